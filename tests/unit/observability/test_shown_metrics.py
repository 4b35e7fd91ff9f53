"""Metrics as people read them."""

import pytest

from rlhf_ray.observability.metric_catalogue import shown
from rlhf_ray.observability.tables import changes


@pytest.mark.parametrize("kl, said", [(-8e-8, 0.0), (9.9e-7, 0.0), (1.1e-6, 1.1e-6), (-0.5, -0.5)])
def test_a_kl_that_is_rounding_is_shown_as_0(kl, said):
    assert shown({"kl": kl, "learning_rate": 1e-8}) == {"kl": said, "learning_rate": 1e-8}


def test_the_only_component_of_a_reward_is_not_repeated():
    assert shown({"reward": 1.5, "reward/good": 1.5000001}) == {"reward": 1.5}
    weighted = {"reward": 3.0, "reward/good": 1.5}
    assert shown(weighted) == weighted
    several = {"reward": 1.5, "reward/good": 1.5, "reward/short": 0.0}
    assert shown(several) == several
    rows = changes({"reward": 1.0, "reward/good": 1.0, "kl": 1e-9}, {"reward": 2.0, "reward/good": 2.0, "kl": 3.0})
    assert rows == [("reward", 1.0, 2.0), ("kl", 0.0, 3.0)]
