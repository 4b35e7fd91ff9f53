"""Checkpoints to copy, and waiting for copies."""

import time

from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.checkpoint.uploader import Uploader
from rlhf_ray.observability.run_directory import RunDirectory
from tests.checkpoints import new_checkpoint


def save(run, step, keep=2):
    with new_checkpoint(CheckpointStore(run / "checkpoints", keep), step) as place:
        (place / "policy").mkdir()
        (place / "policy/rank_0.bin").write_bytes(bytes([step % 256]) * 100_000)
        (place / "coordinator.json").write_text(str(step))


def uploader_of(url, run, **settings):
    return Uploader(url, RunDirectory(run), **{"silence_s": 30, "keep": 2, **settings})


def wait_until(what, timeout_s=20):
    until = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < until
        time.sleep(0.01)
