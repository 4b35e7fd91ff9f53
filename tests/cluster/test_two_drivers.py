"""Two drivers of one run on different machines, as far as either can tell: the one that stood still for too long is
succeeded, and changes nothing when it goes on; the run ends as the undisturbed one, bit for bit."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack

import psutil
import pytest

from rlhf_ray.errors import SupersededError
from rlhf_ray.observability.owner_record import read_owner
from rlhf_ray.replay.ledger import open_for_reading
from tests.cluster.outside import wait_for, wait_for_step
from tests.cluster.resumed import assert_equal_runs

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

DRIVER = """
import sys
from dataclasses import replace
from rlhf_ray.observability import ownership
from rlhf_ray.observability.owner_record import ProcessIdentity
own, host = ProcessIdentity.own(), sys.argv.pop(1)
ProcessIdentity.own = classmethod(lambda _: replace(own, host=host))
ownership.BEAT_S, ownership.SILENT_S = 0.5, 15.0
from rlhf_ray.cli.main import main
main()
"""


@pytest.fixture
def start():
    """start(host, file, log, ...) -> a driver on a machine of that name, to which 15 seconds are a minute."""
    with ExitStack() as stack:
        def begin(host, file, log, *more):
            with log.open("a") as out:
                process = subprocess.Popen([sys.executable, "-c", DRIVER, host, "ppo", str(file), *more], stdout=out,
                                           stderr=out)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        yield begin


def contents(directory):
    """Digests of all files but the record of who owns them."""
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in directory.rglob("*") if path.is_file() and path.parent.name != "owner"}


def test_a_driver_that_was_cut_off_is_succeeded_and_changes_nothing_when_it_comes_back(
        finished, configure, tmp_path, start):
    directory, logs = tmp_path / "run", [tmp_path / "a.log", tmp_path / "b.log", tmp_path / "c.log"]
    file = configure(directory, run={"steps": 4, "dir": str(directory), "seed": 5})
    first = start("a", file, logs[0])
    wait_for(lambda: directory.is_dir() and read_owner(directory), first)
    refused = start("c", file, logs[2], "--resume")
    assert refused.wait(timeout=120) == 2, logs[2].read_text()
    assert f"written by another run, process {first.pid} on a" in logs[2].read_text()
    wait_for_step(directory, 3, first, logs[0])
    wait_for(lambda: (directory / "checkpoints/step_2").is_dir(), first)
    family = psutil.Process(first.pid).children(recursive=True)
    os.kill(first.pid, signal.SIGSTOP)
    second = start("b", file, logs[1], "--resume")
    assert second.wait(timeout=400) == 0, logs[1].read_text()
    assert f"owned by process {first.pid} on a" in logs[1].read_text()
    before = contents(directory)
    os.kill(first.pid, signal.SIGCONT)
    assert first.wait(timeout=120) == SupersededError.exit_code, logs[0].read_text()
    said = logs[0].read_text()
    assert f"was taken over by process {second.pid} on b (term 2)" in said and "Traceback" not in said
    assert contents(directory) == before
    _, alive = psutil.wait_procs(family, timeout=15)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    owner = read_owner(directory)
    assert (owner.term, owner.process.host, owner.ended, owner.went_on_from) == (2, "b", True, 2)
    manifest = json.loads((directory / "checkpoints/step_4/manifest.json").read_text())
    assert manifest["manifest"]["term"] == 2
    assert open_for_reading(directory / "ledger.sqlite").execute(
        "SELECT value FROM facts WHERE name = 'term'").fetchone() == (2,)
    assert_equal_runs(finished.directory, directory)
