"""`rlhf-ray samples`: what it prints, and where it writes the page and the export."""

import json
import os

import pytest

from tests.unit.observability.episode_samples import save_episodes
from tests.unit.observability.test_sample_view import save


@pytest.fixture
def run(tmp_path):
    for step in (1, 2):
        save(tmp_path / "run", step, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    return tmp_path / "run"


def test_the_extremes_of_the_newest_step_are_printed_and_the_page_is_in_the_runs_directory(command_line, run):
    outcome = command_line("samples", str(run))
    assert outcome.code == 0, outcome.err
    titles = [line.partition(" · ")[0] for line in outcome.out.splitlines() if " · step 2, epoch" in line]
    assert titles == ["best 1", "best 2", "best 3", "worst 1", "worst 2", "worst 3"]
    assert outcome.out.endswith(f"\npage: {run / 'samples.html'}\n")
    assert (run / "samples.html").read_text().count("<article") == 8


def test_what_is_asked_for_is_printed(command_line, run, tmp_path):
    outcome = command_line("samples", str(run), "--step", "1", "--worst", "2", "--page", str(tmp_path / "p.html"))
    assert [line.partition(" · ")[0] for line in outcome.out.splitlines() if "epoch" in line] == ["worst 1", "worst 2"]
    assert "<html" in (tmp_path / "p.html").read_text() and not (run / "samples.html").exists()
    outcome = command_line("samples", str(run), "--prompt", "question 3")
    assert [line.partition(",")[0] for line in outcome.out.splitlines() if "epoch" in line] == [
        "sample 1 of 4 · step 1", "sample 2 of 4 · step 1", "sample 3 of 4 · step 2", "sample 4 of 4 · step 2"]


def test_a_directory_that_cannot_be_written_costs_the_page_alone(command_line, run, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("rlhf_ray.files.writing.write_atomically", refuse)
    outcome = command_line("samples", str(run), "--best", "1")
    assert outcome.code == 0 and "best 1" in outcome.out
    assert "samples.html cannot be written (Permission denied); --page names another file" in outcome.err
    outcome = command_line("samples", str(run), "--page", "/nowhere/p.html")
    assert outcome.code == 2 and "--page=/nowhere/p.html cannot be written: Permission denied" in outcome.err


def test_a_place_without_samples(command_line, tmp_path):
    assert "there is no run directory" in command_line("samples", str(tmp_path / "none")).err
    assert command_line("samples", str(tmp_path)).code == 2


def test_a_file_that_is_being_written_is_not_read(command_line, run):
    (run / "samples" / ".step_000003.parquet.t1-abcdefgh").write_bytes(b"half of a file")
    assert "Step 2 " in command_line("samples", str(run)).out and os.listdir(run / "samples")


def titles(out):
    return [line.partition(" · ")[0] for line in out.splitlines() if ", epoch" in line]


def test_samples_are_filtered_by_cause_reward_and_length(command_line, tmp_path):
    save_episodes(tmp_path, 1)
    save_episodes(tmp_path, 2, (-0.25, 0.5))
    run = str(tmp_path)
    both = command_line("samples", run, "--cause", "error_timeout", "--cause", "completed", "--reward=-1..0.5")
    assert titles(both.out) == ["sample 1 of 2", "sample 2 of 2"] and "Step 2 " in both.out, both.err
    assert titles(command_line("samples", run, "--cause", "error_timeout").out) == ["sample 1 of 2", "sample 2 of 2"]
    assert titles(command_line("samples", run, "--reward", "..0", "--best", "3").out) == ["best 1"]
    assert titles(command_line("samples", run, "--length", "3..", "--step", "1..1").out) == ["sample 1 of 1"]
    assert "Steps 1, 2 · 4 samples of 2 prompts" in command_line("samples", run, "--step", "..").out


@pytest.mark.parametrize("option, message", [
    ("--cause=late", "--cause=late: there is no such cause; there are completed, truncated_turn, "),
    ("--reward=high", "'high' is no range: write a number, LOW..HIGH"), ("--step=2..1", "'2..1' is no range"),
    ("--step=9", "has no samples of step 9; it has those of 2 steps from 1 to 2"),
    ("--cause=completed", "step 2 has single responses, which have no cause"),
    ("--length=4..", "no sample of 2 steps in "),
])
def test_conditions_that_nothing_can_meet_are_refused(command_line, run, option, message):
    outcome = command_line("samples", str(run), option)
    assert outcome.code == 2 and message in outcome.err and not outcome.out


def test_of_many_samples_the_first_are_shown_unless_all_are_asked_for(command_line, tmp_path):
    save(tmp_path, 1, [float(i) for i in range(25)], ["x" * 2000] * 25)
    outcome = command_line("samples", str(tmp_path), "--reward", "0..")
    assert titles(outcome.out) == [f"sample {i} of 25" for i in range(1, 21)]
    assert "\n5 samples more: --full shows all, --jsonl FILE writes them\n" in outcome.out
    assert "x … 500 characters … x" in outcome.out
    outcome = command_line("samples", str(tmp_path), "--reward", "0..", "--full")
    assert len(titles(outcome.out)) == 25 and "samples more" not in outcome.out and "x" * 2000 in outcome.out


def test_the_token_view_is_shown_if_asked(command_line, run):
    assert "observed" not in command_line("samples", str(run), "--best", "1").out
    lines = command_line("samples", str(run), "--best", "1", "--tokens").out.splitlines()
    at = lines.index("segment 1, after 1 token of context:")
    assert lines[at + 2].split() == ["1", "sampled", "-1.25", "-0.25", "0.5", "3", '"', 'a"']


def test_the_chosen_samples_are_exported(command_line, run, tmp_path):
    target = tmp_path / "samples.jsonl"
    outcome = command_line("samples", str(run), "--step", "..", "--reward", "6..", "--jsonl", str(target))
    assert (outcome.code, outcome.out) == (0, f"4 samples: {target}\n"), outcome.err
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(line["step"], line["score"]) for line in lines] == [(1, 6), (1, 7), (2, 6), (2, 7)]
    assert not (run / "samples.html").exists()
    outcome = command_line("samples", str(run), "--best", "1", "--worst", "1", "--jsonl", "-")
    assert [json.loads(line)["score"] for line in outcome.out.splitlines()] == [7, 0]
    assert command_line("samples", str(run), "--best", "0", "--jsonl", "-").out == ""


def test_an_export_that_finds_or_writes_nothing_leaves_no_file(command_line, run, tmp_path):
    target = tmp_path / "samples.jsonl"
    outcome = command_line("samples", str(run), "--reward", "99..", "--jsonl", str(target))
    assert outcome.code == 2 and "has a reward in 99.." in outcome.err and not target.exists()
    outcome = command_line("samples", str(run), "--jsonl", "/nowhere/s.jsonl")
    assert outcome.code == 2 and "--jsonl=/nowhere/s.jsonl cannot be written: No such file" in outcome.err
