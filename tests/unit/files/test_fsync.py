"""Flushing: every kind of writer comes through one place, and large files are flushed piece by piece."""

import errno
import os
import threading
import time
from types import SimpleNamespace

import pyarrow as pa
import pytest

from rlhf_ray.checkpoint.export import replacing_export
from rlhf_ray.checkpoint.manifest import MANIFEST_NAME
from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.config.training_loop import LoggingConfig
from rlhf_ray.failpoints import VARIABLE, hanging
from rlhf_ray.files import fsync
from rlhf_ray.files.fsync import Progress, fsync_path, operation, progress, work_for
from rlhf_ray.observability.metrics import MetricsWriter
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.observability.sample_files import SampleWriter
from rlhf_ray.replay.ledger import Ledger
from rlhf_ray.replay.ledger_tables import LedgerFacts
from rlhf_ray.roles.learner_state import LearnerState
from tests.checkpoints import new_checkpoint


def checkpoint(place):
    with new_checkpoint(CheckpointStore(place, 1), 1) as directory:
        (directory / "state.json").write_text("{}")


def export(place):
    with replacing_export(place / "model", 10, "config.json") as new:
        (new / "config.json").write_text("{}")


def learner(place):
    snapshot = SimpleNamespace(write=lambda path: path.write_bytes(b"w"))
    state = LearnerState(SimpleNamespace(snapshot=lambda: snapshot), None, 0)
    state.begin_save(place / "policy", {})
    while not state.save_progress().done:
        pass


def metrics(place):
    MetricsWriter(place, LoggingConfig(tensorboard=False, ray_metrics=False)).write(1, {"loss": 1.0})


def ledger(place):
    Ledger.create(place / "ledger.sqlite", LedgerFacts(1, 1, 0, (1,), 0, False, (1.0,))).start_attempt([], 0)


WRITERS = {
    "state.json": checkpoint, MANIFEST_NAME: checkpoint, "config.json": export, "rank_0.safetensors": learner,
    "metrics.jsonl": metrics, "ledger.sqlite": ledger,
    "step_000001.parquet": lambda place: SampleWriter(place / "samples").write(1, pa.table({"step": [1]})),
    "status.json": lambda place: RunDirectory(place).write_json("status.json", {}),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_writer_can_be_made_to_hang_at_the_flush_of_its_file(tmp_path, monkeypatch, name):
    monkeypatch.setenv(VARIABLE, f"fsync@{name}:hang")
    own = Progress()

    def write():
        if name != "rank_0.safetensors":  # which has a thread of its own
            work_for(own)
        WRITERS[name](tmp_path)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    while thread.is_alive() and not hanging():
        time.sleep(0.01)
    assert len(hanging()) == 1, "it did not come to its flush"
    if name != "rank_0.safetensors":
        assert own.doing.startswith("flush ") and own.doing.endswith(name)
    monkeypatch.delenv(VARIABLE)
    thread.join(10)
    assert not thread.is_alive(), "the disk is back"


def test_a_large_file_is_flushed_piece_by_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(fsync, "RANGE", 4096)
    file = tmp_path / "large"
    file.write_bytes(os.urandom(10 * 4096))
    before = progress().moved
    fsync_path(file)
    assert progress().moved - before >= 10


def test_an_error_of_an_operation_names_its_file(tmp_path):
    with (pytest.raises(OSError, match="metrics.jsonl") as raised, operation("write", tmp_path / "metrics.jsonl"),
          open("/dev/full", "w") as full):
        full.write("a row")
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(tmp_path / "metrics.jsonl"))
