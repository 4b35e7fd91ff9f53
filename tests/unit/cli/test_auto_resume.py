"""The parent of a run: when it starts the run again, what it passes on, what it ends with."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from rlhf_ray.checkpoint.directory import CheckpointStore
from rlhf_ray.cli import auto_resume
from rlhf_ray.cli.auto_resume import Child, run_and_resume
from rlhf_ray.observability.faults import in_one_line, read_faults

KILLED, LOST_A_WORKER, STOPPED, SUPERSEDED = -signal.SIGKILL, 69, 75, 77


@pytest.mark.parametrize(("code", "asked", "again"), [
    (0, False, False), (1, False, False), (2, False, False), (3, False, False), (STOPPED, False, False),
    (KILLED, False, True), (-signal.SIGSEGV, False, True), (LOST_A_WORKER, False, True),
    (SUPERSEDED, False, False), (KILLED, True, False), (-signal.SIGTERM, False, False), (-signal.SIGINT, False, False),
])
def test_only_deaths_that_nobody_asked_for_may_be_gone_on_from(code, asked, again):
    assert Child(code, asked).may_go_on is again


class Runs:
    """Stands in for the child: each start commits some checkpoints and ends with a code."""

    def __init__(self, tmp_path, patch, *lives):
        self.store, self.lives, self.started, self.step = CheckpointStore(tmp_path, 9), list(lives), [], 0
        self.told = []
        patch.setattr(auto_resume, "_run", self.run)

    def run(self, arguments, loss):
        self.started.append(arguments)
        self.told.append(loss and (loss["kind"], loss["reason"]))
        commits, code = self.lives.pop(0)
        for _ in range(commits):
            self.step += 1
            with self.store.writing(self.step) as directory:
                (directory / "x").write_text("x")
        return Child(code, False, 7)


def test_it_goes_on_with_resume_while_checkpoints_are_made(tmp_path, monkeypatch, capsys):
    runs = Runs(tmp_path, monkeypatch, (1, KILLED), (2, LOST_A_WORKER), (1, 0))
    assert run_and_resume(["ppo", "c.yaml"], runs.store, resume=False) == 0
    assert runs.started == [["ppo", "c.yaml"], *[["ppo", "c.yaml", "--resume"]] * 2]
    told = capsys.readouterr().err
    assert "died of SIGKILL; it is started again and goes on from the checkpoint of step 1" in told
    assert "ended with exit code 69; it is started again and goes on from the checkpoint of step 3" in told
    assert runs.told == [None, ("died", "the run died of SIGKILL"), ("failed", "the run ended with exit code 69")]


def test_a_start_after_a_loss_keeps_it_where_report_and_status_find_it(tmp_path, monkeypatch):
    """Once, when it goes on; the one that was lost passes nothing on."""
    code = ("import sys; from pathlib import Path; from rlhf_ray.observability.faults import note_restart; "
            "[note_restart(Path(sys.argv[1]), 4) for _ in range(2)]")
    monkeypatch.setattr(auto_resume, "MAIN", (sys.executable, "-c", code))
    auto_resume._run([str(tmp_path / "faults.jsonl")])
    assert not (tmp_path / "faults.jsonl").exists()
    auto_resume._run([str(tmp_path / "faults.jsonl")], Child(KILLED, False, 7).loss())
    (event,) = read_faults(tmp_path / "faults.jsonl")
    assert (event["role"], event["kind"], event["pid"]) == ("run", "died", 7) and event["recovery_s"] > 0
    assert event["outcome"] == "started again from the checkpoint of step 4" and in_one_line([event]) == "run (died)"


@pytest.mark.parametrize("first", [0, 1])
def test_it_ends_when_a_start_made_no_checkpoint(tmp_path, monkeypatch, capsys, first):
    runs = Runs(tmp_path, monkeypatch, *[(1, KILLED)] * first, (0, KILLED))
    assert run_and_resume(["ppo"], runs.store, resume=True) == 128 + signal.SIGKILL
    assert runs.started == [["ppo", "--resume"]] * (first + 1)
    assert "has made no checkpoint since it was started: it is not started again" in capsys.readouterr().err


SLEEPER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True) or sys.exit(75))
print("ready", flush=True)
time.sleep(60)
"""


def test_a_request_to_stop_reaches_the_child_once_and_its_answer_is_passed_back(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(auto_resume, "MAIN", (sys.executable, "-c", SLEEPER))
    before = signal.getsignal(signal.SIGTERM)

    def ask():
        while "ready" not in (tmp_path / "out").read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    with (tmp_path / "out").open("w") as out:
        saved = os.dup(1)
        os.dup2(out.fileno(), 1)
        try:
            threading.Thread(target=ask, daemon=True).start()
            code = run_and_resume([], CheckpointStore(tmp_path / "checkpoints", 1), resume=False)
        finally:
            os.dup2(saved, 1)
            os.close(saved)
    assert code == STOPPED and (tmp_path / "out").read_text() == "ready\nasked\n"
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_child_is_asked_to_stop_when_its_parent_is_killed(tmp_path):
    code = (f"import sys; from rlhf_ray.cli import auto_resume as a; a.MAIN = (sys.executable, '-c', {SLEEPER!r}); "
            "a._run([])")
    out = (tmp_path / "out").open("w+")
    with subprocess.Popen([sys.executable, "-c", code], stdout=out) as parent:
        until = time.monotonic() + 30
        while "ready" not in (tmp_path / "out").read_text():
            assert time.monotonic() < until
            time.sleep(0.05)
        (child,) = psutil.Process(parent.pid).children()
        parent.kill()
        psutil.wait_procs([child], timeout=20)
    assert (tmp_path / "out").read_text() == "ready\nasked\n" and not child.is_running()
