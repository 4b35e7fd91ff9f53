"""`rlhf-ray samples`: what it prints, and where it writes the page."""

import os

import pytest

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
