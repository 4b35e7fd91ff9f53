"""The figures, the table and the page of a chaos run."""

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from chaos.invariants import Books
from chaos.outcome import outcomes
from chaos.page import page, write_page
from chaos.picture import picture
from chaos.report import figures, print_report, wrong
from chaos.summary import Chaos, Finished

MACHINE = {"cores": 2, "cpu": "a CPU"}
SVG = "{http://www.w3.org/2000/svg}"
PROMISED = {"injected", "survived", "kinds", "lost", "duplicated", "quarantined", "wedges", "detection_p95_s",
            "recovery_p95_s", "recomputed_token_share"}


@pytest.fixture
def chaos(made_up):
    """Two faults of one kind, both survived; ten attempts of a hundred came to nothing."""
    made_up.start(100, 200, 0, 0)
    for time in (110, 130):
        made_up.struck("generator_kill", time, role="generator", pid=int(time))
        made_up.event("generator", int(time), time + 1, time / 10)
    finished = Finished(made_up.record, outcomes(made_up.record), [], 48.0, Books(90, 90, 0, 90, 10),
                        loop_s=96.0, pauses_s=[0.1, 0.3])
    return Chaos(5, "python -m chaos --seed 5", MACHINE, "abc", [finished])


def with_run(chaos, **changes):
    """The same with another outcome."""
    (run,) = chaos.runs
    return Chaos(chaos.seed, chaos.command, chaos.machine, chaos.commit, [
        replace(run, **changes)])


def test_the_summary_has_what_it_promises_and_the_right_numbers(chaos, tmp_path):
    told = json.loads(chaos.write(tmp_path / "results").read_text())
    assert set(told) >= PROMISED
    assert (told["injected"], told["survived"], told["kinds"], told["lost"], told["duplicated"]) == (2, 2, 1, 0, 0)
    assert (told["detection_median_s"], told["recovery_median_s"], told["recovery_p95_s"]) == (1.0, 12.0, 12.9)
    assert (told["recomputed_token_share"], told["effective_time_share"]) == (0.1, 0.5)
    assert (told["commit_pause_median_s"], told["commit_pause_p95_s"]) == (0.2, 0.29)
    assert chaos.sound


def test_a_broken_invariant_is_told_and_not_sound(chaos, capsys):
    broken = with_run(chaos, broken=["1 sample is lost"])
    print_report(broken)
    assert "broken: run_1: 1 sample is lost" in capsys.readouterr().out and not broken.sound
    assert "1 sample is lost" in page(broken) and "Something went wrong" in page(broken)


def test_a_fault_that_was_not_survived_is_told_with_the_command_that_repeats_it(chaos, made_up):
    made_up.struck("policy_stop", 150, role="policy_learner", pid=9)
    failed = with_run(chaos, outcomes=outcomes(made_up.record))
    assert not failed.sound
    (line,) = wrong(failed)
    assert line.endswith("Alone: python -m chaos --seed 5 --only policy_stop") and "never noticed" in line


def test_a_fault_that_was_not_injected_is_not_sound(chaos, made_up):
    made_up.fault("critic_stop")
    missed = with_run(chaos, outcomes=outcomes(made_up.record))
    assert not missed.sound and missed.plain()["injected"] == 2 and "was not injected" in wrong(missed)[0]


def test_the_page_holds_every_figure_and_loads_nothing(chaos, tmp_path):
    text = write_page(chaos, tmp_path / "results").read_text()
    assert "http://" not in text and "https://" not in text
    assert all(value.split(",")[0] in text for value in figures(chaos).values())
    assert text.count("generator with requests in flight is killed") == 1 and text.count("survived</td>") == 2


def test_the_table_in_the_terminal(chaos, capsys):
    print_report(chaos)
    printed = capsys.readouterr().out
    assert "Faults survived: 2 of 2, 1 kinds" in printed and "Samples lost: 0" in printed


def test_books_tell_of_samples_that_are_lost_or_trained_on_twice():
    assert (Books(100, 100, 0, 100, 7).lost, Books(100, 100, 0, 100, 7).duplicated) == (0, 0)
    assert (Books(100, 84, 0, 84, 0).lost, Books(100, 100, 0, 116, 0).duplicated) == (16, 16)


@pytest.mark.parametrize("kind, sound", [("policy_stop", False), ("reply_lost", True)])
def test_a_fault_that_was_never_injected_is_not_sound_but_for_a_message(chaos, made_up, kind, sound):
    made_up.fault(kind)
    missed = with_run(chaos, outcomes=outcomes(made_up.record))
    assert missed.sound is sound and missed.plain()["not_injected"] == [f"run_1: {kind}"]


def test_the_picture_has_a_dot_for_each_fault_hollow_where_it_was_not_survived(chaos, made_up):
    made_up.line("loop", 104, step=0)
    made_up.struck("policy_stop", 150, role="policy_learner", pid=9)
    drawn = picture([replace(chaos.runs[0], outcomes=outcomes(made_up.record))])
    root = ElementTree.fromstring(drawn)
    dots = [dot for dot in root.iter(f"{SVG}circle") if dot.find(f"{SVG}title") is not None]
    assert [dot.get("fill") == "none" for dot in dots] == [False, False, True]
    assert float(dots[0].get("cx")) == 90.0, "a tenth of 100 s of the width"
    assert "2 of 3 faults survived" in drawn
