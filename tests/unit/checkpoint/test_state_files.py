"""Small state and records come back exactly, without pickle."""

from dataclasses import replace

import numpy as np
import pytest

from rlhf_ray.checkpoint.state_files import load_experience, load_state, save_experience, save_state
from rlhf_ray.errors import CheckpointError
from rlhf_ray.records import Experience, SampleKey, offsets_of


def same(a, b):
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and a == b


def experience(values=True):
    rng = np.random.default_rng(0)
    offsets = offsets_of([3, 1, 4])
    floats = {
        name: rng.normal(size=8).astype(np.float32)
        for name in ("behaviour_logprobs", "old_logprobs", "reference_logprobs", "advantages", "returns")
    }
    return Experience(
        offsets=offsets,
        tokens=np.arange(8, dtype=np.int32),
        response_mask=np.arange(8) % 2 == 0,
        values=rng.normal(size=8).astype(np.float32) if values else None,
        keys=[SampleKey(0, 5, 0), SampleKey(0, 5, 1), SampleKey(1, 2, 0)],
        **floats,
    )


def test_state_comes_back_exactly(tmp_path):
    state = {
        "step": 7,
        "big": 2**127 + 1,
        "beta": 0.1 + 0.2,
        "none": None,
        "flag": True,
        "name": "καλημέρα",
        "nested": {"list": [1, [2.5, "x"], []]},
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "empty": np.zeros((0, 3), dtype=np.int8),
        "flags": np.array([True, False]),
        "scalar": np.float32(0.1),
    }
    save_state(tmp_path / "state.json", state)
    loaded = load_state(tmp_path / "state.json")
    assert loaded.keys() == state.keys()
    assert all(same(state[name], loaded[name]) for name in state)
    loaded["array"][0, 0] = 5  # writable


def test_floats_that_are_not_finite_come_back(tmp_path):
    save_state(tmp_path / "state.json", {"best": float("-inf"), "nan": float("nan")})
    loaded = load_state(tmp_path / "state.json")
    assert loaded["best"] == float("-inf") and np.isnan(loaded["nan"])


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (object(), r"state\['a'\]\[1\]"),
        (np.array([object()]), r"state\['a'\]\[1\]"),
        ({1: 2}, r"state\['a'\]\[1\]"),
        ({"__array__": 2}, "reserved"),
        ((1, 2), r"state\['a'\]\[1\]"),
    ],
)
def test_what_json_cannot_hold_is_named(tmp_path, value, place):
    with pytest.raises(CheckpointError, match=place):
        save_state(tmp_path / "state.json", {"a": [0, value]})


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": {"__array__": "!", "dtype": "<f4", "shape": [1]}}'])
def test_damaged_state_is_refused(tmp_path, content):
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"state\.json"):
        load_state(tmp_path / "state.json")


def test_missing_state_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"state\.json"):
        load_state(tmp_path / "state.json")


@pytest.mark.parametrize("values", [True, False])
def test_experience_comes_back_exactly(tmp_path, values):
    saved = experience(values)
    save_experience(tmp_path / "e.npz", saved)
    loaded = load_experience(tmp_path / "e.npz")
    assert all(same(value, loaded.__dict__[name]) for name, value in saved.__dict__.items())


def test_experience_is_stored_without_pickle(tmp_path):
    save_experience(tmp_path / "e.npz", experience())
    with np.load(tmp_path / "e.npz", allow_pickle=False) as data:
        assert data["keys"].tolist() == [[0, 5, 0], [0, 5, 1], [1, 2, 0]]
    with pytest.raises(ValueError, match="Object arrays cannot be saved"):
        save_experience(tmp_path / "e.npz", replace(experience(), tokens=np.array([1, None, 2])))


def test_damaged_experience_is_refused(tmp_path):
    path = tmp_path / "e.npz"
    save_experience(path, experience())
    whole = path.read_bytes()
    with np.load(path) as data:
        columns = dict(data)
    np.savez(path, **{name: column for name, column in columns.items() if name != "keys"})
    for content in (path.read_bytes(), whole[:-40], whole.replace(b"tokens", b"tokenz")):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"e\.npz cannot be read as saved experience"):
            load_experience(path)
