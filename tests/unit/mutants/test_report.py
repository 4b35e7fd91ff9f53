"""The verdict on a round of mutants, and the survivors that change nothing."""

import json

import pytest

from tests.mutants.report import Equivalent, Outcome, Summary, read_equivalents, reason_for, without_source
from tests.mutants.sites import Mutant

MUTANT = Mutant("rlhf_ray/a.py", "f", range(3, 4), False, 3, "x = 1", "x = 2", "")
KNOWN = Equivalent("f", "x = 1", "x = 2", "x is written over below")


def outcome(by: str | None = None, reason: str | None = None) -> Outcome:
    return Outcome("rlhf_ray/a.py", 3, "f", "x = 1", "x = 2", by, tests=7, reached=True, seconds=1.0, reason=reason)


@pytest.mark.parametrize(("killed", "unexplained", "equivalent", "passed"), [
    (95, 5, 0, True), (94, 6, 0, False), (94, 0, 6, True), (94, 1, 5, False), (0, 0, 0, False),
])
def test_a_round_passes_with_95_percent_killed_or_a_reason_for_each_survivor(killed, unexplained, equivalent, passed):
    outcomes = [outcome("a test")] * killed + [outcome()] * unexplained + [outcome(reason="r")] * equivalent
    assert Summary(0, 100, 1.0, outcomes).passed is passed


def test_the_summary_lists_each_survivor_with_its_place_change_and_reason(tmp_path):
    summary = Summary(5, 3, 60.0, [outcome("t"), outcome(), outcome(reason="never read")])
    summary.save(tmp_path)
    assert (tmp_path / "summary.txt").read_text() == (
        "rlhf_ray/a.py:3 f\n  - x = 1\n  + x = 2\n  survived 7 tests\n\n"
        "rlhf_ray/a.py:3 f\n  - x = 1\n  + x = 2\n  equivalent: never read\n\n"
        "1 of 3 mutants killed (33.3 %; 95 % required), 2 survived (1 equivalent), seed 5, 1.0 min\n")
    saved = json.loads((tmp_path / "summary.json").read_text())
    assert (saved["killed"], saved["total"], saved["passed"], len(saved["survivors"])) == (1, 3, False, 2)


def test_an_equivalent_is_known_by_its_text_in_whatever_file_it_is(tmp_path):
    (tmp_path / "e.toml").write_text(
        '[[mutant]]\nfunction = "f"\nbefore = "x = 1"\nafter = "x = 2"\nreason = "x is written over below"\n')
    known = read_equivalents(tmp_path / "e.toml")
    assert known == [KNOWN]
    assert reason_for(MUTANT, known) == "x is written over below"
    assert reason_for(MUTANT, [Equivalent("g", "x = 1", "x = 2", "r"), Equivalent("f", "x = 1", "x = 3", "r")]) is None


def test_entries_whose_code_has_changed_are_found():
    assert without_source([KNOWN], ["def f():\n    x = 1\n"]) == []
    assert without_source([KNOWN], ["def f():\n    x = 7\n"]) == [KNOWN]
