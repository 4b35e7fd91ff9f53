"""Calls of a learner that its parts answer."""

from unittest.mock import create_autospec

import pytest

from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.engine.deepspeed_engine import TrainEngine
from rlhf_ray.roles.learner import Learner
from rlhf_ray.roles.learner_state import LearnerState
from rlhf_ray.roles.publication import PublishedModel

ANSWERED_BY_PARTS = [name for name, value in vars(Learner).items() if isinstance(value, property)]


@pytest.mark.parametrize("name", ANSWERED_BY_PARTS)
def test_a_part_has_each_of_them(name):
    learner = Learner(LearnerConfig(), ModelConfig(path="m"), 0, 1, 0, 1)
    learner.engine = create_autospec(TrainEngine, instance=True)
    learner.state = create_autospec(LearnerState, instance=True)
    learner.published = create_autospec(PublishedModel, instance=True)
    assert callable(getattr(learner, name))


def test_weights_are_neither_sent_nor_kept_before_generators_are_connected():
    learner = Learner(LearnerConfig(zero_stage=1), ModelConfig(path="m"), 0, 1, 0, 1)
    assert learner.offer_bucket(1, 0) is None
    learner.send_bucket()
    learner.release_weights()
