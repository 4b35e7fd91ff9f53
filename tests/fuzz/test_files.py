"""Files of a run with bytes changed or cut off: read as they were written, or refused by name; never a traceback."""

import json
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_ray.checkpoint.manifest import verify_manifest, write_manifest
from rlhf_ray.checkpoint.state_files import load_experience, load_state, load_tensors, save_experience, save_state
from rlhf_ray.errors import CheckpointError, LedgerError
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.audit import audit, counts
from rlhf_ray.replay.ledger import Ledger, open_for_reading
from rlhf_ray.replay.ledger_tables import LedgerFacts
from tests.fuzz.budget import cases
from tests.unit.checkpoint.test_state_files import experience
from tests.unit.replay.ledgers import begin

FACTS = LedgerFacts(samples_per_step=4, samples_per_prompt=2, max_staleness=1, source_rows=(3, 2), seed=0,
                    shuffle=True, weights=(3.0, 2.0))
STATE = {
    "geometry": {"a": 1},
    "run": {"step": 3, "kl": np.float64(0.1), "moments": np.arange(4.0), "keys": [[0, 1, 2]]},
    "buffer": {"ready": []},
    "summaries": [],
}


@st.composite
def damages(draw):
    """A function that changes bytes: cut off, replaced, put in or turned over."""
    kind, where, some = (
        draw(st.sampled_from(["cut", "replace", "insert", "flip"])),
        draw(st.floats(0, 1)),
        draw(st.binary(min_size=1, max_size=6)),
    )
    bit = draw(st.integers(0, 7))

    def damage(content: bytes) -> bytes:
        at = min(int(where * len(content)), len(content) - 1)
        match kind:
            case "cut":
                return content[:at]
            case "replace":
                return content[:at] + some + content[at + len(some) :]
            case "insert":
                return content[:at] + some + content[at:]
        return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]

    return damage


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Directory of one whole file of each kind."""
    folder = tmp_path_factory.mktemp("whole")
    save_state(folder / "coordinator.json", STATE)
    save_experience(folder / "experience_0.npz", experience())
    torch.save({"a": torch.arange(5.0), "b": [1, "x"]}, folder / "rng_0.pt")
    ledger = Ledger.create(folder / "ledger.sqlite", FACTS)
    keys = [SampleKey(0, row, sample) for row in (0, 3) for sample in range(2)]
    begin(ledger, keys)
    ledger.generated(keys, "generator/0")
    ledger.scored(keys, 0)
    ledger.consumed(keys, 1)
    ledger.close()
    write_manifest(folder, 3)
    return folder


def told(path, error):
    """That a message names the file."""
    assert path.name in str(error), str(error)


@given(damages())
@cases(200)
def test_a_manifest(whole, tmp_path_factory, damage):
    folder = tmp_path_factory.mktemp("damaged")
    for file in whole.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    path = folder / "manifest.json"
    before = path.read_bytes()
    path.write_bytes(damage(before))
    if path.read_bytes() == before:
        return
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        verify_manifest(folder)


def damaged(whole, folder, name, damage):
    path = folder / name
    path.write_bytes(damage((whole / name).read_bytes()))
    return path


@given(damages())
@cases(200)
def test_the_coordinators_state(whole, tmp_path_factory, damage):
    path = damaged(whole, tmp_path_factory.mktemp("damaged"), "coordinator.json", damage)
    try:
        assert isinstance(load_state(path), dict)
    except CheckpointError as error:
        told(path, error)


@given(damages())
@cases(200)
def test_experience(whole, tmp_path_factory, damage):
    path = damaged(whole, tmp_path_factory.mktemp("damaged"), "experience_0.npz", damage)
    try:
        record = load_experience(path)
    except CheckpointError as error:
        told(path, error)
    else:
        assert record.keys == experience().keys and np.array_equal(record.offsets, experience().offsets)


@given(damages())
@cases(200)
def test_torch_files(whole, tmp_path_factory, damage):
    path = damaged(whole, tmp_path_factory.mktemp("damaged"), "rng_0.pt", damage)
    try:
        load_tensors(path)
    except CheckpointError as error:
        told(path, error)


@given(damages())
@cases(150)
def test_a_ledger(whole, tmp_path_factory, damage):
    path = damaged(whole, tmp_path_factory.mktemp("damaged"), "ledger.sqlite", damage)
    try:
        with closing(open_for_reading(path)) as db:
            counts(db)
            audit(db, ended=True)
    except LedgerError as error:
        told(path, error)
    try:
        Ledger.resume(path.with_name("next.sqlite"), path, FACTS).close()
    except LedgerError as error:
        assert "ledger.sqlite" in str(error) or "next.sqlite" in str(error)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["__array__", "__bytes__", "__tuple__", "dtype", "shape", "scalar", "run"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=8,
    )
)
@cases(200)
def test_state_of_any_content(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("state") / "coordinator.json"
    path.write_text(json.dumps(value))
    try:
        assert isinstance(load_state(path), dict)
    except CheckpointError as error:
        told(path, error)
