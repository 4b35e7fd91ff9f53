"""A checkpoint that somebody prepared, in every format that a checkpoint holds: nothing of it runs."""

import json
import pickle

import numpy as np
import pytest
import torch

from rlhf_ray.checkpoint.manifest import verify_manifest, write_manifest
from rlhf_ray.checkpoint.state_files import load_experience, load_state, load_tensors, save_experience
from rlhf_ray.engine.ema import WeightAverage
from rlhf_ray.engine.training_state import TrainingState
from rlhf_ray.errors import CheckpointError, LedgerError
from rlhf_ray.replay.ledger import open_for_reading
from tests.sentinel import Sentinel
from tests.unit.checkpoint.test_state_files import experience


@pytest.fixture
def sentinel(tmp_path):
    """A file that is made when poison runs; not there when the test ends."""
    path = tmp_path / "fired"
    yield path
    assert not path.exists()


def zipped(poison, path):
    torch.save({"weights": torch.zeros(2), "extra": poison}, path)


def legacy(poison, path):
    torch.save({"extra": poison}, path, _use_new_zipfile_serialization=False)


def bare(poison, path):
    path.write_bytes(pickle.dumps(poison))


@pytest.mark.parametrize("write", [zipped, legacy, bare])
@pytest.mark.parametrize("read", [load_tensors, object.__new__(WeightAverage).load])
def test_torch_files(tmp_path, sentinel, write, read):
    write(Sentinel(sentinel), tmp_path / "ema_0.pt")
    with pytest.raises(CheckpointError, match=r"ema_0\.pt was not read: it contains \S+"):
        read(tmp_path / "ema_0.pt")


@pytest.mark.parametrize("write", [zipped, legacy, bare])
def test_a_torch_file_in_the_place_of_a_learner_s_state(tmp_path, sentinel, write):
    write(Sentinel(sentinel), tmp_path / "rank_0.safetensors")
    with pytest.raises(CheckpointError, match=r"rank_0\.safetensors is not a learner's state"):
        TrainingState(tmp_path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x02", b"text", bytes(100)])
def test_damaged_torch_files_are_refused_by_name(tmp_path, content):
    (tmp_path / "rng_0.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rng_0\.pt "):
        load_tensors(tmp_path / "rng_0.pt")


def test_a_torch_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"rng_0\.pt cannot be read: No such file"):
        load_tensors(tmp_path / "rng_0.pt")


def test_a_column_of_pickles_among_whole_ones(tmp_path, sentinel):
    path = tmp_path / "experience_0.npz"
    save_experience(path, experience())
    with np.load(path) as data:
        columns = dict(data)
    with path.open("wb") as file:
        np.savez(file, **{**columns, "tokens": np.array([Sentinel(sentinel)] * 2, dtype=object)})
    with pytest.raises(CheckpointError, match=r"experience_0\.npz cannot be read.*allow_pickle=False"):
        load_experience(path)


@pytest.mark.parametrize("write", [bare, lambda poison, path: np.save(path.open("wb"), np.array([poison], object))])
def test_a_pickle_in_place_of_an_archive(tmp_path, sentinel, write):
    write(Sentinel(sentinel), tmp_path / "experience_0.npz")
    with pytest.raises(CheckpointError, match=r"experience_0\.npz cannot be read"):
        load_experience(tmp_path / "experience_0.npz")


@pytest.mark.parametrize("value", [{"__array__": "gASVAAAAAAAAAAA=", "dtype": "|O", "shape": [1], "scalar": False},
                                   {"__reduce__": ["builtins.open", ["SENTINEL", "w"]]}, {"__class__": "os.system"}])
def test_state_with_tags_of_objects_builds_none(tmp_path, sentinel, value):
    (tmp_path / "coordinator.json").write_text(json.dumps({"run": value}).replace("SENTINEL", str(sentinel)))
    try:
        assert load_state(tmp_path / "coordinator.json") == {"run": json.loads(json.dumps(value).replace(
            "SENTINEL", str(sentinel)))}
    except CheckpointError as error:
        assert "coordinator.json cannot be read as saved state" in str(error)


def test_a_ledger_that_is_a_pickle(tmp_path, sentinel):
    bare(Sentinel(sentinel), tmp_path / "ledger.sqlite")
    with pytest.raises(LedgerError, match=r"ledger\.sqlite cannot be read"):
        open_for_reading(tmp_path / "ledger.sqlite")


def test_a_manifest_of_poison_verifies_so_it_is_no_defence(tmp_path, sentinel):
    """Whoever can put a pickle in can write a manifest for it: the readers above are what protects."""
    folder = tmp_path / "step_1"
    folder.mkdir()
    zipped(Sentinel(sentinel), folder / "rng_0.pt")
    write_manifest(folder, 1)
    verify_manifest(folder)
    with pytest.raises(CheckpointError, match="was not read"):
        load_tensors(folder / "rng_0.pt")
