"""A run as its own process: watched through Ray's metrics endpoint, stopped by a signal, gone on with."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import closing, suppress

import psutil
import pytest

from rlhf_ray.checkpoint.directory import CheckpointStore
from rlhf_ray.observability.metrics import read_metrics
from rlhf_ray.replay.audit import audit
from rlhf_ray.replay.ledger import open_for_reading
from tests.cluster.conftest import SMALL

pytestmark = pytest.mark.cluster
RESUMABLE = 75
"""EX_TEMPFAIL of sysexits.h."""


def command_line(*arguments):
    """A `rlhf-ray` process."""
    return subprocess.Popen(
        [sys.executable, "-m", "rlhf_ray.cli.main", *arguments], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "RAY_metrics_report_interval_ms": "1000"}, process_group=0,
    )


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def endpoint(port):
    """The text of Ray's metrics endpoint; empty while there is none."""
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return answer.read().decode()
    return ""


def wait_for(what, run, timeout_s=200):
    """The first true value of `what()`; fails when the run ends or the time passes."""
    until = time.monotonic() + timeout_s
    while not (found := what()):
        assert run.poll() is None, f"the run ended with {run.returncode}:\n{run.stdout.read()}\n{run.stderr.read()}"
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.1)
    return found


def gauge(text, name):
    """Value of a gauge of this run on the endpoint, or None."""
    line = re.search(rf'^{name}\{{[^}}]*run="run"[^}}]*\}} (\S+)$', text, re.M)
    return float(line[1]) if line else None


def shown(port):
    """The endpoint's text once the run's gauges are on it, else empty."""
    text = endpoint(port)
    return text if gauge(text, "ray_rlhf_reward_mean") is not None else ""


def wrong_in(ledger):
    """What the audit finds while the run has not ended."""
    with closing(open_for_reading(ledger)) as db:
        return audit(db, ended=False)


@pytest.fixture(scope="module")
def interrupted(configure, tmp_path_factory):
    """A long run, stopped by one SIGTERM to all of its process group, as schedulers send it, after its gauges were
    seen."""
    directory = tmp_path_factory.mktemp("interrupted") / "run"
    port = free_port()
    file = configure(directory, **SMALL, run={"steps": 100_000}, checkpoint={"every": 0},
                     cluster={"metrics_port": port}, logging={"ray_metrics": True, "samples_per_step": 0})
    run = command_line("ppo", str(file))
    try:
        text = wait_for(lambda: shown(port), run)
        family = psutil.Process(run.pid).children(recursive=True)
        os.killpg(run.pid, signal.SIGTERM)
        output, errors = run.communicate(timeout=90)
    finally:
        if run.poll() is None:
            run.kill()
    _, alive = psutil.wait_procs(family, timeout=15)
    return {
        "directory": directory, "file": file, "gauges": text, "code": run.returncode, "output": output,
        "errors": errors, "names": {path.name for path in directory.iterdir()}, "family": len(family),
        "problems": wrong_in(directory / "ledger.sqlite"),
        "left": [p for p in alive if p.status() != psutil.STATUS_ZOMBIE],
    }


def test_the_run_s_numbers_are_on_ray_s_metrics_endpoint(interrupted):
    rewards = [row["reward/mean"] for row in read_metrics(interrupted["directory"]) if "reward/mean" in row]
    assert min(abs(gauge(interrupted["gauges"], "ray_rlhf_reward_mean") - r) for r in rewards) < 1e-6
    for name in ("kl_sequence", "policy_loss", "throughput_tokens_per_second", "share_generator_busy", "buffer_samples",
                 "staleness_max", "weights_publish_seconds"):
        assert gauge(interrupted["gauges"], f"ray_rlhf_{name}") is not None, name


def test_a_signal_ends_it_with_the_code_for_try_again_and_says_how(interrupted):
    assert interrupted["code"] == RESUMABLE, interrupted["errors"]
    assert "stopped by SIGTERM after step" in interrupted["errors"] and "--resume" in interrupted["errors"]
    assert "Traceback" not in interrupted["errors"] + interrupted["output"]


def test_the_checkpoint_is_of_the_last_finished_step(interrupted):
    step, _, _ = CheckpointStore(interrupted["directory"] / "checkpoints", keep=2).latest()
    assert step == read_metrics(interrupted["directory"])[-1]["step"] >= 1
    assert f"after step {step} of" in interrupted["errors"]


def test_no_process_is_left(interrupted):
    assert interrupted["family"] > 6 and interrupted["left"] == []


def test_an_interrupted_run_does_not_look_like_a_finished_one(interrupted):
    assert not interrupted["names"] & {"summary.json", "model"}


def test_the_ledger_of_an_interrupted_run_adds_up_with_samples_under_way(interrupted):
    assert interrupted["problems"] == []


def test_resume_finishes_the_run(interrupted):
    directory = interrupted["directory"]
    step = read_metrics(directory)[-1]["step"]
    run = command_line("ppo", str(interrupted["file"]), "--resume", f"--run.steps={step + 2}")
    output, errors = run.communicate(timeout=200)
    assert run.returncode == 0, errors
    assert f"resuming after step {step}" in output
    steps = [row["step"] for row in read_metrics(directory) if "reward/mean" in row]
    assert steps == list(range(1, step + 3))
    assert (directory / "model/model.safetensors").is_file() and (directory / "summary.json").is_file()
