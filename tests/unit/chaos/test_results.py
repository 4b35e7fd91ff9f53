"""The figures, the table and the page of a chaos run."""

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from chaos.invariants import Books
from chaos.outcomes import outcomes
from chaos.page import page, picture, write_page
from chaos.summary import CampaignSummary, FinishedRun, figures, print_report, problems
from chaos.witness.testimony import WitnessReport

MACHINE = {"cores": 2, "cpu": "a CPU"}
SVG = "{http://www.w3.org/2000/svg}"
PROMISED = {"injected", "survived", "kinds", "lost", "duplicated", "oracle_lost", "oracle_duplicated", "quarantined",
            "wedges", "detection_p95_s", "recovery_p95_s", "recomputed_token_share", "second_faults", "not_tried"}


@pytest.fixture
def chaos(fake_run):
    """Two faults of one kind, both survived; ten attempts of a hundred came to nothing."""
    fake_run.start(100, 200, 0, 0)
    for time in (110, 130):
        fake_run.injected("generator_kill", time, role="generator", pid=int(time))
        fake_run.event("generator", int(time), time + 1, time / 10)
    finished = FinishedRun(fake_run.record, outcomes(fake_run.record), [], 48.0, Books(90, 90, 0, 90, 10),
                        WitnessReport(90), loop_s=96.0, pauses_s=[0.1, 0.3])
    return CampaignSummary(5, "python -m chaos --seed 5", MACHINE, "abc", [finished])


def with_run(chaos, **changes):
    """The same with another outcome."""
    (run,) = chaos.runs
    return CampaignSummary(chaos.seed, chaos.command, chaos.machine, chaos.commit, [
        replace(run, **changes)])


def test_the_summary_has_what_it_promises_and_the_right_numbers(chaos, tmp_path):
    summary = json.loads(chaos.write(tmp_path / "results").read_text())
    assert set(summary) >= PROMISED
    assert [summary[key] for key in ("injected", "survived", "kinds", "lost", "duplicated")] == [2, 2, 1, 0, 0]
    assert (summary["detection_median_s"], summary["recovery_median_s"], summary["recovery_p95_s"]) == (1.0, 12.0, 12.9)
    assert (summary["recomputed_token_share"], summary["effective_time_share"]) == (0.1, 0.5)
    assert (summary["commit_pause_median_s"], summary["commit_pause_p95_s"]) == (0.2, 0.29)
    assert chaos.sound


def test_a_broken_invariant_is_reported_and_not_sound(chaos, capsys):
    broken = with_run(chaos, broken=["1 sample is lost"])
    print_report(broken)
    assert "broken: run_1: 1 sample is lost" in capsys.readouterr().out and not broken.sound
    assert "1 sample is lost" in page(broken) and "Something went wrong" in page(broken)


def test_a_fault_that_was_not_survived_is_reported_with_the_command_that_repeats_it(chaos, fake_run):
    fake_run.injected("policy_stop", 150, role="policy_learner", pid=9)
    failed = with_run(chaos, outcomes=outcomes(fake_run.record))
    assert not failed.sound
    (line,) = problems(failed)
    assert line.endswith("Alone: python -m chaos --seed 5 --only policy_stop") and "never noticed" in line


def test_a_fault_that_was_not_injected_is_not_sound(chaos, fake_run):
    fake_run.fault("critic_stop")
    missed = with_run(chaos, outcomes=outcomes(fake_run.record))
    assert not missed.sound and missed.as_dict()["injected"] == 2 and "was not injected" in problems(missed)[0]


def test_the_page_holds_every_figure_and_loads_nothing(chaos, tmp_path):
    text = write_page(chaos, tmp_path / "results").read_text()
    assert "http://" not in text and "https://" not in text
    assert all(value.split(",")[0] in text for value in figures(chaos).values())
    assert text.count("generator with requests in flight is killed") == 1 and text.count("survived</td>") == 2


def test_what_the_machine_cannot_do_is_reported_as_not_tried(chaos, tmp_path, capsys):
    chaos.not_tried["disk_full"] = "mounting a file system: this requires root"
    print_report(chaos)
    assert "not tried: disk_full (mounting a file system: this requires root)" in capsys.readouterr().out
    assert chaos.as_dict()["not_tried"] == chaos.not_tried and "this requires root" in page(chaos) and chaos.sound


def test_second_faults_are_those_that_came_during_a_repair(chaos, fake_run):
    for time, repairing in ((150, ["reward_scorer/0"]), (160, [])):
        fake_run.injected("policy_kill", time, role="policy_learner", pid=9, repairing=repairing)
        fake_run.event("policy_learner", None, time + 1, 9.0)
    assert with_run(chaos, outcomes=outcomes(fake_run.record)).as_dict()["second_faults"] == 1


def test_the_table_in_the_terminal(chaos, capsys):
    print_report(chaos)
    printed = capsys.readouterr().out
    assert "Faults survived: 2 of 2, 1 kinds" in printed and "Samples lost: 0" in printed


def test_books_count_samples_that_are_lost_or_trained_on_twice():
    assert (Books(100, 100, 0, 100, 7).lost, Books(100, 100, 0, 100, 7).duplicated) == (0, 0)
    assert (Books(100, 84, 0, 84, 0).lost, Books(100, 100, 0, 116, 0).duplicated) == (16, 16)


@pytest.mark.parametrize("kind, sound", [("policy_stop", False), ("reply_lost", True)])
def test_a_fault_that_was_never_injected_is_not_sound_but_for_a_message(chaos, fake_run, kind, sound):
    fake_run.fault(kind)
    missed = with_run(chaos, outcomes=outcomes(fake_run.record))
    assert missed.sound is sound and missed.as_dict()["not_injected"] == [f"run_1: {kind}"]


def test_the_picture_has_a_dot_for_each_fault_hollow_where_it_was_not_survived(chaos, fake_run):
    fake_run.line("loop", 104, step=0)
    fake_run.injected("policy_stop", 150, role="policy_learner", pid=9)
    drawn = picture([replace(chaos.runs[0], outcomes=outcomes(fake_run.record))])
    root = ElementTree.fromstring(drawn)
    dots = [dot for dot in root.iter(f"{SVG}circle") if dot.find(f"{SVG}title") is not None]
    assert [dot.get("fill") == "none" for dot in dots] == [False, False, True]
    assert float(dots[0].get("cx")) == 90.0, "a tenth of 100 s of the width"
    assert "2 of 3 faults survived" in drawn
