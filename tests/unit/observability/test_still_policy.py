"""A policy that has hardly moved is named, with what to change; one that learns is not."""

import pytest

from rlhf_ray.observability.still_policy import still_policy


def rows(kl, steps=30, std=1.0, **more):
    return [{"step": step, "kl/sequence": kl, "policy/learning_rate": 1e-6, "reward/std": std, **more}
            for step in range(1, steps + 1)] + [{"step": steps, "eval/reward": 1.0}]


def test_a_small_kl_after_many_steps_is_said_with_the_learning_rate():
    assert still_policy(rows(0.02)) == (
        "the policy has hardly moved: KL 0.02 nats a response after step 30. If the reward does not rise, raise "
        "policy.optimizer.learning_rate (1e-06); small models need larger ones")


def test_equal_rewards_are_the_reason_where_all_are_equal():
    assert "nothing to learn from" in still_policy(rows(0.0, std=0.0))


@pytest.mark.parametrize("made", [
    rows(1.0), rows(-1.0), rows(0.02, steps=19), rows(None), [], [{"step": 9, "loss": 1}]])
def test_otherwise_nothing_is_said(made):
    assert still_policy(made) == ""
