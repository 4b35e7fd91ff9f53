"""Small state and records come back exactly, without pickle."""

import json
from dataclasses import replace

import numpy as np
import pytest

from rlhf_ray.checkpoint.state_files import load_records, load_state, save_records, save_state
from rlhf_ray.errors import CheckpointError
from rlhf_ray.records import Experience, Prompts, Rollout, SampleKey, offsets_of


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


def rollout():
    return Rollout(
        offsets=offsets_of([2, 2]),
        tokens=np.arange(4, dtype=np.int32),
        response_mask=np.array([False, True, False, True]),
        logprobs=np.zeros(4, np.float32),
        versions=np.array([-1, 3, -1, 4], np.int32),
        keys=[SampleKey(0, 0, 0), SampleKey(0, 1, 0)],
        seeds=np.array([2**62, 1], np.int64),
        finish_reasons=["stop", "length"],
    )


def prompts():
    return Prompts(
        offsets=offsets_of([1, 2]),
        tokens=np.arange(3, dtype=np.int32),
        texts=["ä", "two words"],
        metadata=[{"answer": 4}, {"answer": [1.5, None]}],
        rows=np.array([7, 3]),
    )


def test_state_comes_back_exactly(tmp_path):
    state = {
        "step": 7,
        "big": 2**127 + 1,
        "beta": 0.1 + 0.2,
        "none": None,
        "flag": True,
        "name": "καλημέρα",
        "nested": {"list": [1, (2.5, "x"), []]},
        "bytes": bytes(range(256)),
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


@pytest.mark.parametrize("record", [experience(), experience(values=False), rollout(), prompts()])
def test_records_come_back_exactly(tmp_path, record):
    save_records(tmp_path / "records.npz", record)
    loaded = load_records(tmp_path / "records.npz", type(record))
    assert all(same(value, loaded.__dict__[name]) for name, value in record.__dict__.items())


def test_records_are_stored_without_pickle(tmp_path):
    save_records(tmp_path / "records.npz", experience())
    with np.load(tmp_path / "records.npz", allow_pickle=False) as data:
        assert data["keys"].tolist() == [[0, 5, 0], [0, 5, 1], [1, 2, 0]]
        assert json.loads(data["__record__"].tobytes())["type"] == "Experience"


def test_a_column_of_objects_is_refused(tmp_path):
    record = prompts()
    broken = replace(record, tokens=np.array([1, None, 2]))
    with pytest.raises(CheckpointError, match=r"Prompts\.tokens holds Python objects"):
        save_records(tmp_path / "records.npz", broken)


def test_a_pickled_file_is_refused(tmp_path):
    np.savez(tmp_path / "records.npz", __record__=np.array([object()]))
    with pytest.raises(CheckpointError, match="cannot be read as saved records"):
        load_records(tmp_path / "records.npz", Experience)


def test_records_of_another_type_are_refused(tmp_path):
    save_records(tmp_path / "records.npz", rollout())
    with pytest.raises(CheckpointError, match="holds Rollout records instead of Experience"):
        load_records(tmp_path / "records.npz", Experience)


def test_columns_that_do_not_fit_the_offsets_are_refused(tmp_path):
    record = prompts()
    save_records(tmp_path / "records.npz", replace(record, tokens=record.tokens[:2]))
    with pytest.raises(CheckpointError, match="tokens has 2 entries instead of one per token, 3"):
        load_records(tmp_path / "records.npz", Prompts)


def test_truncated_records_are_refused(tmp_path):
    path = tmp_path / "records.npz"
    save_records(path, experience())
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match="cannot be read as saved records"):
        load_records(path, Experience)
