"""accelerate's trackers, in a process whose environment names a distributed group that it is not to join."""

import os
from typing import get_args

import torch.distributed
from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from rlhf_ray.config.training_loop import TrackerName
from rlhf_ray.internals.accelerate import new_tracker
from rlhf_ray.observability.trackers import TITLES


def test_a_tracker_logs_without_joining_the_group_that_the_environment_names(tmp_path, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_PORT", raising=False)  # accelerate would set it
    before = dict(os.environ)
    tracker = new_tracker("tensorboard", "run", tmp_path)  # the one whose package is installed in any case
    tracker.start()
    tracker.log({"reward": 1.0}, step=1)
    tracker.finish()
    assert list((tmp_path / "run").glob("events*"))
    assert dict(os.environ) == before
    assert not torch.distributed.is_initialized()
    assert not PartialState._shared_state


def test_the_trackers_are_those_of_accelerate_apart_from_tensorboard():
    names = set(get_args(TrackerName))
    assert {*names, "tensorboard"} == set(LOGGER_TYPE_TO_CLASS)
    assert set(TITLES) == names
