"""A job's output over connections that break; how a job stands; the end of one by force."""

import asyncio
import json
import os
import subprocess
import sys

import psutil
import pytest

from rlhf_ray.cluster.jobs import log_stream
from rlhf_ray.cluster.jobs.job import Job
from rlhf_ray.cluster.jobs.kill_driver import kill
from rlhf_ray.cluster.jobs.log_stream import follow
from rlhf_ray.errors import ClusterError


class Breaking:
    """A job server whose connections end after some pieces; the last one ends well."""

    url = "http://there"

    def __init__(self, text, ends):
        self.text, self.ends = text, list(ends)

    async def tail(self, job_id):
        end = self.ends.pop(0)
        for begin in range(0, len(self.text) if end is None else end, 3):
            yield self.text[begin : begin + 3]
        if end is not None:
            raise RuntimeError("WebSocket connection closed unexpectedly")

    def job(self, name):
        return Job(name, "SUCCEEDED")


def test_nothing_is_shown_twice_and_nothing_is_missed(monkeypatch):
    monkeypatch.setattr(log_stream, "PAUSE_S", 0.0)
    shown = []
    job = asyncio.run(follow(Breaking("abcdefghijklmnop", [4, 1, 9, None]), "it", shown.append))
    assert "".join(shown) == "abcdefghijklmnop" and job.over


def test_what_was_seen_before_is_skipped(monkeypatch):
    shown = []
    asyncio.run(follow(Breaking("abcdefgh", [None]), "it", shown.append, skip=5))
    assert "".join(shown) == "fgh"


def test_a_server_that_stays_away_ends_the_following_and_not_the_job(monkeypatch):
    monkeypatch.setattr(log_stream, "PAUSE_S", 0.0)
    monkeypatch.setattr(log_stream, "UNREACHABLE_S", 0.05)
    with pytest.raises(ClusterError, match=r"unreachable.*may still be running"):
        asyncio.run(follow(Breaking("abc", [0] * 100_000), "it", lambda _: None))


@pytest.mark.parametrize(("state", "code", "exit_code", "said"), [
    ("SUCCEEDED", 0, 0, "finished"), ("FAILED", 2, 2, "was refused (exit code 2)"),
    ("FAILED", None, 1, "failed (exit code 1)"), ("FAILED", 75, 75, "--resume continues"),
    ("FAILED", 69, 69, "lost a worker"), ("FAILED", 68, 68, "lost its Ray cluster"),
    ("FAILED", -9, 137, "killed; --resume"), ("FAILED", -11, 139, "killed by SIGSEGV; --resume"),
    ("STOPPED", None, 75, "--resume"),
    ("FAILED", 3, 3, "stopped itself early")])
def test_how_a_job_ended(state, code, exit_code, said):
    job = Job("it", state, {"stage": "ppo", "run": "it"}, code=code)
    assert job.over and job.exit_code == exit_code and said in job.describe_state()
    assert job.resumable is (exit_code in (68, 69, 75, 137, 139)) is ("--resume" in job.describe_state())


def test_all_processes_of_a_job_are_killed_and_no_others():
    def sleeper(job):
        config = json.dumps({"metadata": {"job_submission_id": job}})
        return subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"],
                                stdout=subprocess.PIPE, env={**os.environ, "RAY_JOB_CONFIG_JSON_ENV_VAR": config})

    ours, others = [sleeper("mine-1"), sleeper("mine-1")], sleeper("mine-12")
    try:
        for process in (*ours, others):
            process.stdout.readline()
        assert kill("mine-1") == 2
        assert [psutil.pid_exists(process.pid) for process in (*ours, others)] == [False, False, True]
    finally:
        for process in (*ours, others):
            process.kill()
            process.wait()
            process.stdout.close()
