"""What may be added to the policy's learner, on real DeepSpeed ranks: an average of its weights."""

import json

import numpy as np
import pytest

from rlhf_ray.checkpoint.model_card import ModelCardInfo
from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.errors import CheckpointError
from rlhf_ray.roles.updates import mini_batches
from tests.cluster.test_learner_update import (  # noqa: F401 (fixtures)
    LARGE,
    SEED,
    SMALL,
    experiences,
    floor,
    fresh_ranks,
    policy_arguments,
    ranks,
)

pytestmark = pytest.mark.cluster
DECAY = 0.7
# ruff: noqa: F811 (fixtures are imported under the names that tests ask for)


def averaged(files, zero=1, budget=SMALL, **algorithm):
    """Arguments of a policy that keeps an average of its weights."""
    algo = AlgorithmConfig(whiten_advantages=False, **{"epochs": 1, "mini_batches": 1, **algorithm})
    arguments = policy_arguments(files, zero, budget, algo=algo)
    return {**arguments, "config": arguments["config"].model_copy(update={"ema_decay": DECAY})}


def average_of(weights):
    """The average by hand, of weights after each optimizer step; the first are those before any."""
    average = {name: value.astype(np.float64) for name, value in weights[0].items()}
    for later in weights[1:]:
        average = {name: DECAY * value + (1 - DECAY) * later[name] for name, value in average.items()}
    return average


def assert_average(found, weights):
    expected = average_of(weights)
    assert set(found) == set(expected)
    for name, value in found.items():
        assert np.abs(value - expected[name]).max() < 1e-6, name
        assert np.abs(value - weights[-1][name]).max() > 1e-3, f"{name} hardly moves"


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_average_over_three_updates_is_the_one_by_hand(ranks, files, experiences, zero, world):
    learners = ranks.make(world, "PolicyLearner", averaged(files, zero))
    seen = [learners.weights()]
    for step in range(3):
        learners.do("update", step, 0.0, *experiences)
        seen.append(learners.weights())
    assert_average(learners.weights("average"), seen)


def test_every_optimizer_step_of_an_update_counts(ranks, files, experiences):
    learners = ranks.make(1, "PolicyLearner", averaged(files, budget=LARGE))
    whole = experiences[0].concat(experiences)
    half = whole.select(next(mini_batches(len(whole), 1, 2, SEED, 0)))
    seen = [learners.weights()]
    learners.do("update", 0, 0.0, half)
    seen.append(learners.weights())
    learners = ranks.make(1, "PolicyLearner", averaged(files, budget=LARGE, mini_batches=2))
    learners.do("update", 0, 0.0, *experiences)
    seen.append(learners.weights())
    assert_average(learners.weights("average"), seen)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_average_that_was_saved_goes_on_bit_for_bit(ranks, fresh_ranks, files, experiences, tmp_path, zero):
    learners = ranks.make(2, "PolicyLearner", averaged(files, zero))
    learners.do("update", 0, 0.0, *experiences)
    learners.do("save", str(tmp_path))
    saved = learners.weights("average")
    learners.do("update", 1, 0.0, *experiences)
    others = fresh_ranks.make(2, "PolicyLearner", averaged(files, zero))
    others.do("load", str(tmp_path))
    assert all(np.array_equal(value, saved[name]) for name, value in others.weights("average").items())
    others.do("update", 1, 0.0, *experiences)
    ends = learners.weights("average"), others.weights("average")
    assert all(np.array_equal(ends[0][name], ends[1][name]) for name in saved)
    assert all(np.abs(ends[0][name] - saved[name]).max() > 0 for name in saved)


def test_a_checkpoint_without_an_average_is_refused_by_a_run_that_keeps_one(ranks, files, experiences, tmp_path):
    learners = ranks.make(2, "PolicyLearner", policy_arguments(files, 1, SMALL))
    learners.do("save", str(tmp_path))
    learners = ranks.make(2, "PolicyLearner", averaged(files))
    with pytest.raises(CheckpointError, match=r"no average of the weights .* had no policy.ema_decay"):
        learners.do("load", str(tmp_path))


@pytest.mark.parametrize("zero", [1, 3])
def test_the_exported_average_loads_in_transformers(ranks, files, experiences, tmp_path, zero):
    from transformers import AutoModelForCausalLM

    learners = ranks.make(2, "PolicyLearner", averaged(files, zero))
    learners.do("update", 0, 0.0, *experiences)
    card = ModelCardInfo("ppo", 1, "base", "rows", weights="the average")
    for method, name in (("export", "model"), ("export_average", "model_ema")):
        learners.do(method, str(tmp_path / name), card)
    for which, name in (("weights", "model"), ("average", "model_ema")):
        loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / name).named_parameters())
        assert all(np.array_equal(loaded[n].detach().numpy(), w) for n, w in learners.weights(which).items())
    assert "Weights: the average" in (tmp_path / "model_ema/README.md").read_text()
    assert json.loads((tmp_path / "model_ema/config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
