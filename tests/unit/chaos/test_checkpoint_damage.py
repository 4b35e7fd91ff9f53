"""Damage to checkpoints is damage, to the newest one, and only where another is left."""

import pytest

from chaos.checkpoint_damage import damage
from chaos.faults import Fault
from rlhf_ray.checkpoint.store import CheckpointStore
from tests.checkpoints import new_checkpoint


@pytest.fixture
def store(tmp_path):
    """Two checkpoints of two files."""
    store = CheckpointStore(tmp_path, keep=2, warn=lambda _: None)
    for step in (8, 12):
        with new_checkpoint(store, step) as place:
            (place / "a").write_bytes(bytes(range(50)))
            (place / "b").write_bytes(b"b" * 7)
    return store


@pytest.mark.parametrize("kind", ["checkpoint_flip", "checkpoint_truncate", "checkpoint_delete"])
@pytest.mark.parametrize("place", [0.0, 0.2, 0.5, 0.99])
def test_the_newest_checkpoint_is_not_whole_any_more_and_the_other_is(store, kind, place):
    said = damage(Fault(1, kind, 1, position=place), store.root)
    assert said is not None and said.startswith("step_12/")
    found = store.latest()
    assert found is not None and found.step == 8


def test_the_only_checkpoint_left_is_spared(store):
    fault = Fault(1, "checkpoint_flip", 1, position=0.4)
    assert damage(fault, store.root) is not None and damage(fault, store.root) is None
    found = store.latest()
    assert found is not None and found.step == 8
