"""`rlhf-ray status --watch`; what a page says is tested in `observability/test_status_page.py`."""

import json
import subprocess
from dataclasses import replace

import pytest

from rlhf_ray.cli import run_commands
from rlhf_ray.observability.owner_record import ProcessIdentity, Record

ELSEWHERE = Record(1, ProcessIdentity("here", "another boot", 1, 77, 5), 0.0, 0.0)


@pytest.fixture
def watched(command_line, tmp_path, monkeypatch):
    """Watch a run that `change(seconds, own, show)` changes; the output, and the seconds until the watch ended."""
    owner, waits = tmp_path / "owner/term_1.json", []
    owner.parent.mkdir()

    def own(record):
        owner.write_bytes(record.encoded())

    def show(step, **live):
        state = {"time": 0.0, "step": step, "steps": 9, "under_way": [],
                 "buffer": {"ready": 0, "under_way": 0, "training": 0, "mb": 0}}
        (tmp_path / "status.json").write_text(json.dumps(state | live))

    def watch(change, record=ELSEWHERE):
        def sleep(seconds):
            waits.append(seconds)
            assert sum(waits) < 600, "the watch does not end"
            change(sum(waits), own, show)

        own(record)
        show(1)
        monkeypatch.setenv("COLUMNS", "300")
        monkeypatch.setattr(run_commands.time, "sleep", sleep)
        outcome = command_line("status", str(tmp_path), "--watch")
        assert outcome.code == 0
        return outcome.out, sum(waits)

    return watch


def test_watching_ends_at_once_with_a_finished_run_and_shows_its_last_page(watched, tmp_path):
    def change(seconds, own, show):
        if seconds == 6:
            show(9, ended="finished")
            (tmp_path / "summary.json").write_text(json.dumps({"stage": "ppo", "steps": 9}))

    out, seconds = watched(change)
    assert seconds == 6 and "step 9 of 9, finished" in out


def test_a_run_that_is_resumed_within_a_minute_is_watched_further(watched):
    def change(seconds, own, show):
        if seconds in (10, 100):
            own(replace(ELSEWHERE, term=seconds, ended=True))
        if seconds == 60:
            own(replace(ELSEWHERE, term=2))
            show(5, ended="stopped by SIGTERM")

    out, seconds = watched(change)
    assert seconds == 100 + run_commands.RESTART_S - 2 and "step 5 of 9, stopped by SIGTERM" in out


def test_a_killed_driver_s_run_ends_too(watched):
    process = subprocess.Popen(["true"])
    here = ProcessIdentity.own()
    process.wait()
    out, seconds = watched(lambda *_: None, replace(ELSEWHERE, process=replace(here, pid=process.pid)))
    assert seconds == run_commands.RESTART_S and "hangs or is gone" in out
