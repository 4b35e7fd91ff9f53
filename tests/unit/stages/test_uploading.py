"""What a stage makes of copies that fail, and of a run that is further elsewhere than here."""

import json
import shutil

import pytest

from rlhf_ray.checkpoint import uploader as module
from rlhf_ray.checkpoint.remote import RemoteDirectory
from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.config.stages import SFTConfig
from rlhf_ray.errors import RunInterrupted, UploadError
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.stages.runtime import checkpoint_store, fetch_uploaded, uploading
from tests.checkpoints import new_checkpoint


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    monkeypatch.setattr(module, "LAST_TRIES_S", (0.0,))
    return SFTConfig(run={"dir": str(tmp_path / "run"), "upload": f"file://{tmp_path}/there"}, data={"path": "d"},
                     model={"path": "m"})


def directory_of(config):
    directory = RunDirectory(config.run.dir)
    directory.path.mkdir(exist_ok=True)
    return directory


def broken(*_):
    raise OSError("away")


def test_a_run_that_ended_well_says_in_its_summary_that_copies_are_missing(config, monkeypatch):
    directory = directory_of(config)
    with pytest.raises(UploadError, match="OSError: away"), uploading(config, directory, resume=False):
        monkeypatch.setattr(RemoteDirectory, "put", broken)
        directory.write_json("summary.json", {"stage": "sft", "steps": 3})
    summary = json.loads(directory.summary.read_text())
    assert summary["steps"] == 3 and "OSError: away" in summary["upload_failed"]


def test_why_a_run_ended_is_more_to_the_point_than_copies_that_fail(config, monkeypatch):
    with pytest.raises(RunInterrupted), uploading(config, directory_of(config), resume=False):
        monkeypatch.setattr(RemoteDirectory, "put", broken)
        directory_of(config).write_json("status.json", {})
        raise RunInterrupted("stopped by SIGTERM")


def test_an_interrupted_run_is_copied_with_its_last_checkpoint(config):
    directory = directory_of(config)
    with pytest.raises(RunInterrupted), uploading(config, directory, resume=False):
        with new_checkpoint(CheckpointStore(directory.checkpoints, keep=1), 5) as place:
            (place / "x").write_text("5")
        raise RunInterrupted("stopped by SIGTERM")
    assert RemoteDirectory(config.run.upload).steps() == [5]


def test_a_resume_elsewhere_begins_with_what_was_copied(config, tmp_path):
    test_an_interrupted_run_is_copied_with_its_last_checkpoint(config)
    other = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(tmp_path / "other")})})
    fetch_uploaded(other, RunDirectory(other.run.dir))
    assert CheckpointStore(tmp_path / "other/checkpoints", 1).latest().step == 5


def test_without_a_place_nothing_is_copied(config, tmp_path):
    plain = config.model_copy(update={"run": config.run.model_copy(update={"upload": None})})
    with uploading(plain, directory_of(plain), resume=False):
        pass
    assert not (tmp_path / "there").exists()


def test_a_ledger_of_this_machine_does_not_follow_a_checkpoint_from_elsewhere(config):
    test_an_interrupted_run_is_copied_with_its_last_checkpoint(config)
    directory = directory_of(config)
    directory.ledger.write_bytes(b"what this machine did after an earlier checkpoint")
    fetch_uploaded(config, directory)
    assert directory.ledger.exists(), "nothing newer was fetched"
    RemoteDirectory(config.run.upload).put_checkpoint(moved_to(directory, 5, 9))
    shutil.rmtree(directory.checkpoints)
    fetch_uploaded(config, directory)
    assert CheckpointStore(directory.checkpoints, 1).latest().step == 9 and not directory.ledger.exists()


def moved_to(directory, step, other):
    """A checkpoint of another step with the same files."""
    with new_checkpoint(CheckpointStore(directory.checkpoints, keep=2), other) as place:
        (place / "x").write_bytes((directory.checkpoints / f"step_{step}/x").read_bytes())
    return directory.checkpoints / f"step_{other}"


def test_the_store_of_a_stage_prunes_nothing_that_is_being_copied(config):
    directory = directory_of(config)
    store = checkpoint_store(config, directory, keep=1)
    for step in (1, 2, 3):
        directory.being_uploaded = 1 if step < 3 else None
        with new_checkpoint(store, step) as place:
            (place / "x").write_text(str(step))
        assert [kept for kept, _ in store.steps()] == ([step, 1] if step == 2 else [step])
