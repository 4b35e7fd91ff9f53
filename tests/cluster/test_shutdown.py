"""However a run ends, nothing of it is left: no process, shared memory, temporary file or half checkpoint."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from rlhf_ray.checkpoint.store import CheckpointStore
from tests.cluster.conftest import SMALL
from tests.cluster.outside import wait_for
from tests.cluster.processes import abandoned, shared_memory

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
FUNCTION = """
import os

def score(responses):
    if os.path.exists({stop!r}):
        raise ValueError("no score any more")
    return [float(len(response)) for response in responses]
"""
SHORT, LONG = 3, 100_000
STARTING = "Ctrl-C while it starts"
AGAIN_S = 0.3
"""Between two signals of a person in a hurry."""


def signals(*numbers):
    """end(run, directory) that sends signals to the process group, as a terminal and schedulers do."""
    def end(run, _):
        for number in numbers:
            os.killpg(run.pid, number)
            time.sleep(AGAIN_S)

    return end


def an_error(_, directory):
    """The reward function fails from now on."""
    (directory.parent / "stop").touch()


def nothing(*_):
    """The run comes to its end."""


ENDS = {
    "its last step": (SHORT, nothing, 0, "in_process"), "SIGTERM": (LONG, signals(signal.SIGTERM), 75, "in_process"),
    "Ctrl-C": (LONG, signals(signal.SIGINT), 75, "in_process"),
    "Ctrl-C twice": (LONG, signals(signal.SIGINT, signal.SIGINT), 75, "in_process"),
    "Ctrl-C twice, with vLLM's own processes": (LONG, signals(signal.SIGINT, signal.SIGINT), 75, "async"),
    "an error": (LONG, an_error, 1, "in_process"),
    STARTING: (LONG, signals(signal.SIGINT), 75, "async"),
}


@pytest.fixture
def places():
    """Where temporary files of a run lie, and those of Ray (short names: its sockets lie there)."""
    root = Path(tempfile.mkdtemp(prefix="end-", dir="/tmp"))
    (root / "tmp").mkdir()
    (root / "ray").mkdir()
    yield root
    shutil.rmtree(root)


def ended(run):
    """Whether a process is over; one that nobody has asked about yet counts."""
    return not run.is_running() or run.status() == psutil.STATUS_ZOMBIE


def begin(file, places):
    return subprocess.Popen(
        [sys.executable, "-m", "rlhf_ray.cli.main", "ppo", str(file)], text=True, process_group=0,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(places / "tmp"), "RAY_TMPDIR": str(places / "ray")})


@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left_of_a_run_that_ends_by(end, configure, tmp_path, places):
    steps, cause, code, engine = ENDS[end]
    directory = tmp_path / "run"
    (tmp_path / "f.py").write_text(FUNCTION.format(stop=str(tmp_path / "stop")))
    rewards = {"main": {"type": "function", "function": f"{tmp_path}/f.py:score"}}
    file = configure(directory, **SMALL | {"generator": {"workers": 1, "engine": engine}}, run={"steps": steps},
                     checkpoint={"every": 1}, rewards=rewards)
    segments = shared_memory()
    run = begin(file, places)
    try:
        wait_for(lambda: (directory / "checkpoints/step_1").exists() if end != STARTING else
                 any("vllm_dist" in str(path) for path in (places / "tmp").rglob("*")), run)
        family = psutil.Process(run.pid).children(recursive=True)
        assert list((places / "tmp").iterdir()), "no temporary file was ever there"
        cause(run, directory)
        output, errors = run.communicate(timeout=120)
    finally:
        if run.poll() is None:
            run.kill()
    assert run.returncode == code and "Traceback" not in output + errors, errors
    psutil.wait_procs(family, timeout=15)
    assert len(family) > 6 and [p for p in family if not ended(p)] == []
    assert abandoned(segments) == set()
    assert [str(path) for path in (places / "tmp").rglob("*")] == []
    assert [path for path in directory.rglob(".*") if path.name.startswith((".tmp", ".old", ".del"))] == []
    assert [path.name for path in directory.iterdir() if path.name.startswith(".")] == []
    newest = CheckpointStore(directory / "checkpoints", keep=2).latest()
    assert newest is not None or end == STARTING


AGENTS = """
import psutil, time
from rlhf_ray.cluster.session import ray_session
from rlhf_ray.config.run import ClusterConfig

with ray_session(ClusterConfig(dashboard=False, object_store_mb=100), {}, "agents"):
    family = psutil.Process().children(recursive=True)
    next(process for process in family if process.name() == "raylet").suspend()
print(*(process.pid for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE))
"""
"""A session whose raylet is killed in its shutdown, because it does not end in the second that Ray gives it."""


def test_a_raylet_that_is_stopped_holds_up_no_shutdown_and_none_of_ray_s_agents_outlives_it():
    ended = subprocess.run([sys.executable, "-c", AGENTS], capture_output=True, text=True, timeout=200)
    assert (ended.returncode, ended.stdout.strip()) == (0, ""), ended.stderr
