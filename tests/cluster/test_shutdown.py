"""When a run has ended well nothing of it is left: no process, shared memory, temporary file or half checkpoint."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from rlhf_ray.checkpoint.directory import CheckpointStore
from tests.cluster.conftest import SMALL
from tests.cluster.outside import wait_for
from tests.cluster.processes import abandoned, shared_memory

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
FUNCTION = "def score(responses):\n    return [float(len(response)) for response in responses]\n"


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


def test_nothing_is_left_of_a_run(configure, tmp_path, places):
    directory = tmp_path / "run"
    (tmp_path / "f.py").write_text(FUNCTION)
    rewards = {"main": {"type": "function", "function": f"{tmp_path}/f.py:score"}}
    file = configure(directory, **SMALL, run={"steps": 3}, checkpoint={"every": 1},
                     rewards=rewards)
    segments = shared_memory()
    run = subprocess.Popen(
        [sys.executable, "-m", "rlhf_ray.cli.main", "ppo", str(file)], text=True, process_group=0,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(places / "tmp"), "RAY_TMPDIR": str(places / "ray")})
    try:
        wait_for(lambda: (directory / "checkpoints/step_1").exists(), run)
        family = psutil.Process(run.pid).children(recursive=True)
        _, errors = run.communicate(timeout=120)
    finally:
        if run.poll() is None:
            run.kill()
    assert run.returncode == 0, errors
    psutil.wait_procs(family, timeout=15)
    assert len(family) > 6 and [p for p in family if not ended(p)] == []
    assert abandoned(segments) == set()
    assert [path.name for path in (places / "tmp").iterdir()] == []
    assert [path for path in directory.rglob(".*") if path.name.startswith((".tmp", ".old", ".del"))] == []
    assert [path.name for path in directory.iterdir() if path.name.startswith(".")] == []
    CheckpointStore(directory / "checkpoints", keep=2).latest()
