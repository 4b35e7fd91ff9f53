"""Learners with passes in bfloat16 at every ZeRO stage, on two ranks of real DeepSpeed: their updates are those of
plain torch under autocast, and a resumed one goes on to the same bits. Weights and optimizer stay in float32."""

from functools import wraps

import numpy as np
import pytest
import torch

from rlhf_ray.roles.ppo_update import training_batch
from tests.cluster.learners.plain_torch import (
    SMALL,
    algorithm,
    critic_arguments,
    critic_terms,
    load_classifier,
    load_policy,
    plain_update,
    policy_arguments,
    policy_terms,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

APART = {"PolicyLearner": 0.3, "CriticLearner": 0.05}
"""Of the size of an update, how far bfloat16 may lead it from plain torch's: about twice what it does to plain torch's
own. The policy's rounded log-probabilities move ratios across the clip."""
CLASSES = pytest.mark.parametrize("cls", ["PolicyLearner", "CriticLearner"])
STAGES = pytest.mark.parametrize("zero", [0, 1, 2, 3])


def half(terms):
    @wraps(terms)
    def rounded(*given):
        with torch.autocast("cpu", torch.bfloat16):
            return terms(*given).float()

    return rounded


def arguments_of(cls, files, zero, **settings):
    given = (policy_arguments if cls == "PolicyLearner" else critic_arguments)(files, zero, SMALL)
    return {**given, "config": given["config"].model_copy(update={"autocast": "bfloat16", **settings})}


def change(before, after):
    return np.concatenate([(after[name] - before[name]).ravel() for name in before])


@CLASSES
@STAGES
def test_an_update_in_bfloat16_is_plain_torch_s_but_for_rounding(ranks, files, experiences, cls, zero):
    policy = cls == "PolicyLearner"
    load, path, terms = (load_policy, files.tied, policy_terms) if policy else (
        load_classifier, files.reward, critic_terms)
    batch = training_batch(experiences, whiten=policy)
    exact, rounded = (plain_update(load(path), batch, how(terms), algorithm()) for how in (lambda same: same, half))
    learners = ranks.make(2, cls, arguments_of(cls, files, zero))
    before = learners.weights()
    stats = learners.do("update", 0, *((0.0,) if policy else ()), *experiences)
    found, size = change(before, learners.weights()), np.linalg.norm(change(*exact))
    assert [s.applied for s in stats] == [4, 4] and all(s.metrics == stats[0].metrics for s in stats)
    assert np.linalg.norm(found - change(*rounded)) < APART[cls] * size
    assert np.linalg.norm(found - change(*exact)) > 1e-4 * size, "or nothing was rounded"


@CLASSES
@STAGES
def test_a_resumed_learner_in_bfloat16_goes_on_to_the_same_bits(ranks, files, experiences, cls, zero, tmp_path):
    arguments, numbers = arguments_of(cls, files, zero), (0.0,) if cls == "PolicyLearner" else ()
    learners = ranks.make(2, cls, arguments)
    learners.do("update", 0, *numbers, *experiences)
    learners.save(tmp_path)
    learners.do("offload_state")  # between phases: on CPUs the state stays where it is
    learners.do("reload_state")
    following = learners.do("update", 1, *numbers, *experiences)[0].metrics, learners.weights()
    resumed = ranks.make(2, cls, arguments)
    resumed.do("load", str(tmp_path))
    assert resumed.do("update", 1, *numbers, *experiences)[0].metrics == following[0]
    assert all(np.array_equal(following[1][name], weights) for name, weights in resumed.weights().items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="offload_optimizer keeps the optimizer state of a GPU "
                    "learner in CPU memory, and is refused without GPUs, where it lies in CPU memory anyway")
@CLASSES
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_an_offloaded_optimizer_makes_the_same_update(ranks, files, experiences, cls, zero):
    ends, numbers = [], (0.0,) if cls == "PolicyLearner" else ()
    for offloaded in (False, True):
        learners = ranks.make(1, cls, arguments_of(cls, files, zero, gpus=1.0, offload_optimizer=offloaded))
        before = learners.weights()
        learners.do("update", 0, *numbers, *experiences)
        ends.append(change(before, learners.weights()))
    assert np.linalg.norm(ends[1] - ends[0]) < 1e-3 * np.linalg.norm(ends[0])
