"""A stage in a process of its own on a disk that hangs: it ends by itself, with the exit code that says `--resume`."""

import os
import signal
import subprocess
import sys
import time

import pytest

from rlhf_ray.failpoints import VARIABLE

PROGRAM = """
import asyncio, sys
from contextlib import nullcontext
from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.config.stages import SFTConfig
from rlhf_ray.coordinator.stop import StopRequest
from rlhf_ray.errors import RLHFError
from rlhf_ray.observability.metrics import MetricsWriter
from rlhf_ray.stages import runtime
from tests.checkpoints import new_checkpoint
runtime.ray_session = lambda *_: nullcontext()
config = SFTConfig(run={"dir": sys.argv[1]}, data={"path": "d"}, model={"path": "m"},
                   logging={"tensorboard": False, "ray_metrics": False}, cluster={"disk_timeout_s": float(sys.argv[2])})
try:
    with runtime.owned_directory(config, True) as directory:
        files, store = directory.files, CheckpointStore(directory.checkpoints, 9, term=directory.term)

        def checkpoint():
            with new_checkpoint(store, 1) as place:
                (place / "weights").write_text("1")

        async def main(_):
            stop = StopRequest(print, files.hurry)
            with stop.listening():
                metrics = await files.records.run(MetricsWriter, directory.path, config.logging, None, directory.term)
                print("begun", flush=True)
                await files.records.run(metrics.write, 1, {"loss": 1.0})
                await files.checkpoints.run(checkpoint)
            return {"stage": "sft", "steps": 1}

        runtime.run_stage(config, directory, True, main)
except RLHFError as error:
    print(error, flush=True)
    sys.exit(error.exit_code)
"""


def started(place, hang, timeout_s):
    environment = {**os.environ, **({VARIABLE: hang} if hang else {})}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(place), str(timeout_s)], env=environment,
                            stdout=subprocess.PIPE, text=True)


def end(process):
    try:
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, said


def test_on_a_disk_that_works_it_ends_well(tmp_path):
    assert end(started(tmp_path / "run", None, 60))[0] == 0


@pytest.mark.parametrize("file", ["", "@manifest.json"])
def test_it_ends_by_itself_wherever_the_disk_hangs(tmp_path, file):
    code, said = end(started(tmp_path / "run", f"fsync{file}:hang", 2))
    assert code == 69 and f"{file.removeprefix('@')} has made no progress for" in said


def test_a_signal_ends_it_at_once_while_its_disk_hangs(tmp_path):
    process = started(tmp_path / "run", "fsync@metrics.jsonl:hang", 3600)
    assert [process.stdout.readline() for _ in range(2)] == ["starting Ray\n", "begun\n"]
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)  # there is nothing to save yet, so the first one means at once
    code, said = end(process)
    assert code == 75 and "stopped at once by SIGTERM" in said
