"""The parent of a run: when it starts the run again, what it passes on, what it ends with."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.cli import auto_resume
from rlhf_ray.cli.auto_resume import Child, Outage, run_and_resume
from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.errors import ENDINGS, RESTARTABLE, RLHFError
from rlhf_ray.observability.faults import in_one_line, read_faults
from tests.checkpoints import new_checkpoint

KILLED, LOST_ITS_CLUSTER, LOST_A_WORKER, STOPPED, SUPERSEDED = -signal.SIGKILL, 68, 69, 75, 77


@pytest.mark.parametrize(("code", "asked", "again"), [
    (0, False, False), (1, False, False), (2, False, False), (3, False, False), (STOPPED, False, False),
    (KILLED, False, True), (-signal.SIGSEGV, False, True), (LOST_A_WORKER, False, True),
    (LOST_ITS_CLUSTER, False, True), (LOST_ITS_CLUSTER, True, False), (74, False, False), (SUPERSEDED, False, False),
    (KILLED, True, False), (-signal.SIGTERM, False, False), (-signal.SIGINT, False, False),
])
def test_only_deaths_that_nobody_asked_for_may_be_gone_on_from(code, asked, again):
    assert Child(code, asked).may_go_on is again


class Runs:
    """Stands in for the child: each start commits some checkpoints and ends with a code."""

    def __init__(self, tmp_path, patch, *lives):
        self.store, self.lives, self.started, self.step = CheckpointStore(tmp_path, 9), list(lives), [], 0
        self.told = []
        self.pauses, self.up, self.stop_after = [], lambda: True, None
        patch.setattr(auto_resume, "_pause", self.pause)
        patch.setattr(auto_resume, "_run", self.run)

    def run(self, arguments, loss):
        self.started.append(arguments)
        self.told.append(loss and (loss["kind"], loss["reason"]))
        commits, code = self.lives.pop(0)
        for _ in range(commits):
            self.step += 1
            with new_checkpoint(self.store, self.step) as directory:
                (directory / "x").write_text("x")
        return Child(code, False, 7)

    def pause(self, seconds):
        """A virtual clock, and a request to stop in the given pause."""
        self.pauses.append(seconds)
        return len(self.pauses) == self.stop_after

    def go(self, command=("ppo", "c.yaml"), resume=False, address=None, start_timeout_s=100):
        cluster = ClusterConfig(address=address, start_timeout_s=start_timeout_s)
        outage = Outage(cluster, lambda asked: asked == address and self.up(), lambda: sum(self.pauses))
        return run_and_resume(list(command), self.store, resume, outage)


def test_it_goes_on_with_resume_while_checkpoints_are_made(tmp_path, monkeypatch, capsys):
    runs = Runs(tmp_path, monkeypatch, (1, KILLED), (2, LOST_A_WORKER), (1, 0))
    assert runs.go() == 0
    assert runs.started == [["ppo", "c.yaml"], *[["ppo", "c.yaml", "--resume"]] * 2]
    told = capsys.readouterr().err
    assert "died of SIGKILL; restarting it from the checkpoint of step 1" in told
    assert "essential task failed (exit code 69); restarting it from the checkpoint of step 3" in told
    assert runs.told == [None, ("died", "the run died of SIGKILL"), ("failed", f"the run {ENDINGS[69]} (exit code 69)")]


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
    assert runs.go(["ppo"], resume=True) == 128 + signal.SIGKILL
    assert runs.started == [["ppo", "--resume"]] * (first + 1)
    assert "saved no checkpoint since its start: it is not restarted" in capsys.readouterr().err


def test_a_lost_cluster_is_waited_for_with_growing_pauses_though_no_checkpoint_was_made(tmp_path, monkeypatch, capsys):
    runs = Runs(tmp_path, monkeypatch, (1, LOST_ITS_CLUSTER), (0, LOST_ITS_CLUSTER), (1, 0))
    runs.up = lambda: sum(runs.pauses) >= 12 and len(runs.pauses) != 5
    assert runs.go(address="head:6379") == 0
    assert runs.pauses == [1, 2, 4, 8, 16, 32], "the third start comes later again: nothing was made in the second"
    assert runs.started == [["ppo", "c.yaml"], *[["ppo", "c.yaml", "--resume"]] * 2]
    told = capsys.readouterr().err
    assert ("lost its Ray cluster, or could not connect to it (exit code 68); trying head:6379 again in 4 s, "
            "for at most 97") in told
    assert told.count("restarting it from the checkpoint of step 1") == 2


def test_pauses_begin_anew_when_a_checkpoint_was_made_in_between_and_have_a_longest(tmp_path, monkeypatch):
    runs = Runs(tmp_path, monkeypatch, (0, LOST_ITS_CLUSTER), (1, LOST_ITS_CLUSTER), (0, 0))
    runs.up = lambda: sum(runs.pauses) >= 200
    assert runs.go(address="head:6379", start_timeout_s=1000) == 0
    assert runs.pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60, 1]


def test_a_cluster_that_stays_away_ends_it_with_the_code_of_its_loss(tmp_path, monkeypatch, capsys):
    runs = Runs(tmp_path, monkeypatch, (1, LOST_ITS_CLUSTER))
    runs.up = lambda: False
    assert runs.go(address="head:6379") == LOST_ITS_CLUSTER
    assert runs.pauses == [1, 2, 4, 8, 16, 32, 37], "100 s in all"
    assert "did not respond within cluster.start_timeout_s=100 s: the run is not restarted" in capsys.readouterr().err


def test_a_cluster_that_takes_connections_and_no_runs_is_not_tried_for_ever(tmp_path, monkeypatch):
    runs = Runs(tmp_path, monkeypatch, *[(0, LOST_ITS_CLUSTER)] * 9)
    assert runs.go(address="head:6379") == LOST_ITS_CLUSTER
    assert runs.pauses == [1, 2, 4, 8, 16, 32, 37] and len(runs.started) == 8


def test_hours_in_which_the_run_had_its_cluster_are_no_part_of_the_wait(tmp_path, monkeypatch):
    runs = Runs(tmp_path, monkeypatch, (0, LOST_ITS_CLUSTER), (0, LOST_ITS_CLUSTER), (1, 0))
    lives, at_work_s = runs.run, []

    def run(arguments, loss):
        at_work_s.append(5000)
        return lives(arguments, loss)

    monkeypatch.setattr(auto_resume, "_run", run)
    outage = Outage(ClusterConfig(address="head:6379", start_timeout_s=100), lambda _: len(runs.pauses) > 1,
                    lambda: sum(at_work_s) + sum(runs.pauses))
    assert run_and_resume(["ppo"], runs.store, False, outage) == 0
    assert runs.pauses == [1, 2, 4]


@pytest.mark.parametrize("code", [KILLED, LOST_A_WORKER])
def test_a_run_that_died_of_another_loss_waits_too_while_its_cluster_does_not_answer(tmp_path, monkeypatch, code):
    runs = Runs(tmp_path, monkeypatch, (0, code), (0, code))
    runs.up = lambda: len(runs.pauses) > 1
    assert runs.go(address="head:6379") == (code if code > 0 else 128 - code)
    assert (runs.pauses, len(runs.started)) == ([1, 2], 2), "the second time it is the run's own: no checkpoint"


@pytest.mark.parametrize(("commits", "starts"), [(1, 2), (0, 1)])
def test_a_local_cluster_is_started_again_with_the_run_at_once(tmp_path, monkeypatch, commits, starts):
    runs = Runs(tmp_path, monkeypatch, (commits, LOST_ITS_CLUSTER), (0, 0))
    assert runs.go() == (0 if commits else LOST_ITS_CLUSTER)
    assert len(runs.started) == starts and runs.pauses == []


def test_a_request_to_stop_ends_the_wait(tmp_path, monkeypatch, capsys):
    runs = Runs(tmp_path, monkeypatch, (1, LOST_ITS_CLUSTER))
    runs.up, runs.stop_after = lambda: False, 3
    assert runs.go(address="head:6379") == STOPPED
    assert "stopped while waiting for the cluster" in capsys.readouterr().err


def test_a_pause_is_over_at_a_request_to_stop():
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    before = signal.getsignal(signal.SIGTERM)
    assert auto_resume._pause(60) is True and signal.getsignal(signal.SIGTERM) == before
    assert auto_resume._pause(0.01) is False


def test_a_request_to_stop_in_the_moment_in_which_a_pause_begins_ends_it():
    """In a process of its own: a handler that waits for a lock of the thread that it interrupts waits for ever."""
    code = """
import select, signal, threading
from rlhf_ray.cli import auto_resume

def interrupted(wait):
    def early(*arguments):
        signal.raise_signal(signal.SIGTERM)
        return wait(*arguments)
    return early

threading.Condition.wait, select.select = interrupted(threading.Condition.wait), interrupted(select.select)
raise SystemExit(75 if auto_resume._pause(60) else 1)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=50).returncode == 75


def test_exit_codes_in_the_docs_are_those_of_the_errors():
    page = (Path(__file__).parents[3] / "docs/recovery.md").read_text()
    rows = re.findall(r"^\| (\d+) \|.*\| (yes|no)[^|]*\|$", page, re.MULTILINE)
    documented = {int(code): again == "yes" for code, again in rows}
    assert documented == {code: code in RESTARTABLE for code in documented}
    kinds, codes = [RLHFError], {0}
    while kinds:
        kind = kinds.pop()
        codes.add(kind.exit_code)
        kinds += kind.__subclasses__()
    assert documented.keys() == codes == {0, 1, *ENDINGS}


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
            code = run_and_resume([], CheckpointStore(tmp_path / "checkpoints", 1), False,
                                  Outage(ClusterConfig(), lambda _: True))
        finally:
            os.dup2(saved, 1)
            os.close(saved)
    assert code == STOPPED and (tmp_path / "out").read_text() == "ready\nasked\n"
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_child_is_asked_to_stop_when_its_parent_is_killed(tmp_path):
    code = (f"import sys; from rlhf_ray.cli import auto_resume as a; a.MAIN =(sys.executable, '-c', {SLEEPER!r}); "
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
