"""Random states continue where they were taken."""

import random

import numpy as np
import pytest
import torch

from rlhf_ray.checkpoint.rng import rng_state, set_rng_state
from rlhf_ray.checkpoint.state_files import load_tensors
from rlhf_ray.errors import CheckpointError


@pytest.fixture(autouse=True)
def keep_state():
    saved = rng_state()
    yield
    set_rng_state(saved)


def draw():
    # An odd number of normals leaves a cached one behind, which the states must hold too.
    return (
        [random.random(), random.gauss(0, 1)],
        np.random.normal(size=3).tolist(),
        torch.randn(17).tolist(),
    )


def through_a_file(state, folder):
    torch.save(state, folder / "rng.pt")
    return load_tensors(folder / "rng.pt")


def test_draws_repeat_after_the_state_is_set(tmp_path):
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draw()
    state = through_a_file(rng_state(), tmp_path)
    expected = draw()
    assert draw() != expected
    set_rng_state(state)
    assert draw() == expected


def test_taking_the_state_changes_nothing():
    state = rng_state()
    expected = draw()
    set_rng_state(state)
    rng_state()
    assert draw() == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="this process has CUDA devices")
def test_cuda_states_without_their_devices_are_refused():
    with pytest.raises(CheckpointError, match="of 1 CUDA devices and this process sees 0"):
        set_rng_state({**rng_state(), "cuda": ["00"]})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_draws_repeat_after_the_state_is_set(tmp_path):
    torch.cuda.manual_seed_all(5)
    state = through_a_file(rng_state(), tmp_path)
    assert len(state["cuda"]) == torch.cuda.device_count()
    expected = torch.randn(9, device="cuda").tolist()
    set_rng_state(state)
    assert torch.randn(9, device="cuda").tolist() == expected


@pytest.mark.parametrize("broken", [{}, {"python": 1}, None])
def test_what_is_no_state_is_refused(broken):
    with pytest.raises(CheckpointError, match="not a saved random state"):
        set_rng_state({**rng_state(), "torch": "zz"} if broken is None else broken)


def test_a_state_without_gpus_is_taken_where_there_are_some(monkeypatch):
    state = rng_state()
    expected = torch.rand(3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    set_rng_state({**state, "cuda": []})
    assert torch.equal(torch.rand(3), expected)
