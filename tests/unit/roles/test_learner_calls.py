"""Calls of a learner that its parts answer."""

from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.roles.learner import Learner


def test_weights_are_neither_sent_nor_kept_before_generators_are_connected():
    learner = Learner(LearnerConfig(zero_stage=1), ModelConfig(path="m"), 0, 1, 0, 1)
    assert learner.offer_bucket(1, 0) is None
    learner.send_bucket()
    learner.release_weights()
