"""`rlhf-ray status --watch`; what a page says is tested in `observability/test_status_page.py`."""

import json
from dataclasses import replace

import pytest

from rlhf_ray.cli import run_commands
from rlhf_ray.observability.owner_record import ProcessIdentity, Record
from rlhf_ray.observability.ownership import SILENT_S

ELSEWHERE = Record(1, ProcessIdentity("here", "another boot", 1, 77, 5), 0.0, 0.0)


class Run:
    """A run's directory, written by hand."""

    def __init__(self, path):
        self.path, self.record = path, ELSEWHERE
        (path / "owner").mkdir()
        self.own()
        self.show(1)

    def own(self, **changes):
        """Change the owner's record."""
        self.record = replace(self.record, **changes)
        (self.path / "owner/term_1.json").write_bytes(self.record.encoded())

    def renew(self):
        """As a live driver does."""
        self.own(beat=self.record.beat + 1)

    def show(self, step, **live):
        state = {"time": 0.0, "step": step, "steps": 9, "under_way": [],
                 "buffer": {"ready": 0, "under_way": 0, "training": 0, "mb": 0}}
        (self.path / "status.json").write_text(json.dumps(state | live))

    def summarise(self):
        (self.path / "summary.json").write_text(json.dumps({"stage": "ppo", "steps": 9}))


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


@pytest.fixture
def watched(command_line, run, monkeypatch):
    """Watch a run that `change(seconds)` changes; the output, and the seconds until the watch ended."""

    def watch(change):
        waits = []

        def sleep(seconds):
            waits.append(seconds)
            assert sum(waits) < 600, "the watch does not end"
            change(sum(waits))

        monkeypatch.setenv("COLUMNS", "300")
        monkeypatch.setattr(run_commands.time, "sleep", sleep)
        outcome = command_line("status", str(run.path), "--watch")
        assert outcome.code == 0
        return outcome.out, sum(waits)

    return watch


@pytest.mark.parametrize("end", ["finished", "stopped early: the KL is above 10"])
def test_watching_ends_with_a_finished_run_and_shows_its_last_page(run, watched, end):
    def change(seconds):
        run.renew()
        if seconds == 100:
            run.show(9, ended=end)
        if seconds == 104:
            run.summarise()
        if seconds == 108:
            run.own(ended=True)

    out, seconds = watched(change)
    assert seconds == 108 and f"step 9 of 9, {end}" in out


def test_a_stage_that_writes_no_status_ends_with_its_summary(run, watched):
    (run.path / "status.json").unlink()
    (run.path / "metrics.jsonl").write_text(json.dumps({"step": 3, "time": 1.0}) + "\n")

    def change(seconds):
        run.summarise()
        run.own(ended=True)

    assert watched(change)[1] == run_commands.WATCH_EVERY_S


def test_a_finished_run_that_is_extended_is_watched(run, watched):
    run.show(9, ended="finished")
    run.summarise()

    def change(seconds):
        run.renew()
        if seconds == 80:
            run.own(ended=True)

    assert watched(change)[1] == 80


def test_a_run_that_is_stopped_is_watched_for_a_minute_more_in_which_it_may_go_on(run, watched):
    def change(seconds):
        if seconds in (10, 100):
            run.show(5, ended="stopped by SIGTERM")
            run.own(ended=True)
        if seconds == 60:
            run.own(ended=False, beat=9)

    out, seconds = watched(change)
    assert seconds == 100 + SILENT_S and "step 5 of 9, stopped by SIGTERM" in out


def test_a_driver_that_does_not_move_is_watched_for_a_minute(watched):
    """Killed, or cut off on another machine."""
    out, seconds = watched(lambda seconds: None)
    assert seconds == SILENT_S and "hangs or is gone" in out


def test_watching_waits_for_a_run_that_was_started_a_moment_ago(run, command_line, monkeypatch):
    aside = run.path.rename(run.path.with_name("aside"))
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 2:
            aside.rename(run.path)
            run.show(9, ended="finished")
            run.summarise()
            run.own(ended=True)

    monkeypatch.setattr(run_commands.time, "sleep", sleep)
    outcome = command_line("status", str(run.path), "--watch")
    assert outcome.code == 0 and len(waits) == 2 and "finished" in outcome.out
