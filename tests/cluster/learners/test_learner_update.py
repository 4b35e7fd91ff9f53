"""Learners on real DeepSpeed ranks, compared with plain torch: one padded-free row after another, one AdamW, no engine.

However the batch is cut (micro-batches), shared out (ranks) and stored (ZeRO stage), the update is the same.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.data.supervised_records import Pairs
from rlhf_ray.records import TokenScores
from rlhf_ray.roles.ppo_update import mini_batches, training_batch
from tests.cluster.learners.plain_torch import (
    COEF,
    LARGE,
    OPTIMIZER,
    SEED,
    SMALL,
    STEPS,
    UNCLIPPED,
    VOCAB,
    algorithm,
    assert_same_update,
    critic_arguments,
    critic_terms,
    load_classifier,
    load_policy,
    make_rollout,
    make_sequences,
    make_step_rows,
    pair_loss,
    penalised_terms,
    plain_logprobs,
    plain_supervised,
    plain_update,
    poisoned,
    policy_arguments,
    policy_terms,
    row_values,
    sft_loss,
    states,
    step_loss,
    supervised_arguments,
)

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def plain_policy(files, experiences):
    """plain_policy(algorithm) -> weights before and after in plain torch, remembered."""
    known = {}

    def update(algo):
        key = algo.model_dump_json()
        if key not in known:
            batch = training_batch(experiences, algo.whitens)
            known[key] = plain_update(load_policy(files.tied), batch, policy_terms, algo)
        return known[key]

    return update


@pytest.fixture(scope="module")
def plain_critic(files, experiences):
    return plain_update(load_classifier(files.reward), training_batch(experiences, False), critic_terms, algorithm())


CUTS = [(zero, budget, False) for zero in (0, 1, 2, 3) for budget in (LARGE, SMALL)]


CUTS += [(1, SMALL, True), (3, SMALL, True)]


SUPERVISED = [(1, 1, LARGE), (1, 0, SMALL), (2, 1, SMALL), (2, 2, LARGE), (2, 3, SMALL)]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("zero", "budget", "checkpointing"), CUTS)
def test_the_policy_s_update_is_plain_torch_s(
    ranks, files, experiences, plain_policy, world, zero, budget, checkpointing
):
    learners = ranks.make(world, "PolicyLearner", policy_arguments(files, zero, budget, checkpointing))
    before = learners.weights()
    stats = learners.do("update", 0, 0.0, *experiences)
    assert_same_update(plain_policy(algorithm()), before, learners.weights())
    assert [s.applied for s in stats] == [4] * world
    assert all(s.metrics == stats[0].metrics for s in stats)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("zero", [1, 3])
def test_a_critic_whose_loss_is_a_mean_of_rows_does_not_depend_on_the_cut_either(
    ranks, files, experiences, zero, world
):
    algo = algorithm(aggregate="sequence")
    expected = plain_update(load_classifier(files.reward), training_batch(experiences, False), critic_terms, algo)
    learners = ranks.make(world, "CriticLearner", {**critic_arguments(files, zero, SMALL), "algorithm": algo})
    before = learners.weights()
    learners.do("update", 0, *experiences)
    assert_same_update(expected, before, learners.weights())


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("changes", [{"aggregate": "sequence"}, {"entropy_coef": 0.3},
                                     {"aggregate": "sequence", "entropy_coef": 0.3}], ids=str)
def test_other_losses_do_not_depend_on_the_cut_either(ranks, files, experiences, plain_policy, changes, zero, world):
    algo = algorithm(**changes)
    learners = ranks.make(world, "PolicyLearner", policy_arguments(files, zero, SMALL, algo=algo))
    before = learners.weights()
    learners.do("update", 0, 0.0, *experiences)
    assert_same_update(plain_policy(algo), before, learners.weights())


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("zero", "checkpointing"), [(0, False), (1, False), (3, False), (3, True)])
def test_logits_in_chunks_make_the_same_update(ranks, files, experiences, plain_policy, world, zero, checkpointing):
    """Chunks of five tokens: ranks with unequal micro-batches need unequal numbers of them, and must agree on one."""
    algo, rollout = algorithm(entropy_coef=0.3), make_rollout(experiences[1])
    arguments = policy_arguments(files, zero, 48, checkpointing, algo=algo)
    learners = ranks.make(world, "PolicyLearner", arguments, 5 * VOCAB)
    found = TokenScores.concat(learners.do("logprobs", rollout))
    expected = plain_logprobs(load_policy(files.tied), rollout.tokens, rollout.offsets, rollout.response_mask)
    assert np.abs(found.values - expected).max() < 1e-5
    before = learners.weights()
    learners.do("update", 0, 0.0, *experiences)
    assert_same_update(plain_policy(algo), before, learners.weights())


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "checkpointing"), [(0, 0.5), (2, False)])
def test_an_update_with_compiled_layers_is_plain_torch_s(ranks, files, experiences, plain_policy, zero, checkpointing):
    arguments = policy_arguments(files, zero, SMALL, checkpointing)
    compiled = arguments["config"].model_copy(update={"compile_layers": True})
    learners = ranks.make(1, "PolicyLearner", {**arguments, "config": compiled})
    assert learners.compiled == "2 layers are compiled, each as a whole"
    before = learners.weights()
    learners.do("update", 0, 0.0, *experiences)
    assert_same_update(plain_policy(algorithm()), before, learners.weights())


@pytest.mark.parametrize("estimator", ["k2", "k3", "abs"])
def test_the_penalty_in_the_loss_is_plain_torch_s(ranks, files, experiences, estimator):
    algo = AlgorithmConfig(epochs=1, mini_batches=1, kl={"placement": "loss", "estimator": estimator})
    learners = ranks.make(2, "PolicyLearner", policy_arguments(files, 1, SMALL, algo=algo, optimizer=UNCLIPPED))
    before = learners.weights()
    stats = learners.do("update", 0, COEF, *experiences)
    batch = training_batch(experiences, True)
    expected = plain_update(load_policy(files.tied), batch, penalised_terms, algo, UNCLIPPED)
    assert_same_update(expected, before, learners.weights())
    assert stats[0].metrics["kl_penalty"] == stats[1].metrics["kl_penalty"] != 0


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_single_unclipped_step_has_the_gradient_s_own_size(ranks, files, experiences, zero, world):
    algo = AlgorithmConfig(epochs=1, mini_batches=1)
    expected = plain_update(load_policy(files.tied), training_batch(experiences, True), policy_terms, algo, UNCLIPPED)
    learners = ranks.make(world, "PolicyLearner", policy_arguments(files, zero, SMALL, algo=algo, optimizer=UNCLIPPED))
    before = learners.weights()
    learners.do("update", 0, 0.0, *experiences)
    assert_same_update(expected, before, learners.weights())


@pytest.mark.parametrize("changes", [{}, {"aggregate": "sequence", "entropy_coef": 0.3}], ids=str)
def test_metrics_of_an_update_do_not_depend_on_the_cut(ranks, files, experiences, changes):
    found = []
    for world, budget in ((1, LARGE), (1, SMALL), (2, SMALL)):
        learners = ranks.make(world, "PolicyLearner", policy_arguments(files, 1, budget, algo=algorithm(**changes)))
        found.append(learners.do("update", 0, 0.0, *experiences)[0].metrics)
    assert {"loss", "clip_fraction", "approx_kl", "grad_norm", "entropy"} <= set(found[0])
    assert found[1] == pytest.approx(found[0], rel=1e-4) and found[2] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("zero", "budget", "checkpointing"), CUTS[::3])
def test_the_critic_s_update_is_plain_torch_s(
    ranks, files, experiences, plain_critic, world, zero, budget, checkpointing
):
    learners = ranks.make(world, "CriticLearner", critic_arguments(files, zero, budget, checkpointing))
    before = learners.weights()
    learners.do("update", 0, *experiences)
    assert_same_update(plain_critic, before, learners.weights())


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("zero", [1, 3])
def test_old_logprobs_are_hugging_face_s_log_softmax(ranks, files, experiences, world, zero):
    rollout = make_rollout(experiences[1])
    learners = ranks.make(world, "PolicyLearner", policy_arguments(files, zero, SMALL))
    found = TokenScores.concat(learners.do("logprobs", rollout))
    expected = plain_logprobs(load_policy(files.tied), rollout.tokens, rollout.offsets, rollout.response_mask)
    assert np.array_equal(found.offsets, rollout.offsets)
    assert np.abs(found.values - expected).max() < 1e-5
    assert (found.values[~rollout.response_mask] == 0).all() and expected.min() < -1


@pytest.mark.parametrize(("world", "zero"), [(1, 1), (2, 3)])
@pytest.mark.parametrize("changes", [{"importance": {"tokens": "none"}}, {"kl": {"placement": "loss"}}], ids=str)
def test_an_update_of_one_step_can_take_the_old_logprobs_from_its_own_forward(
    ranks, files, experiences, changes, world, zero
):
    """The update is the same to rounding, and the gap to the generators' is measured."""
    algo = AlgorithmConfig(epochs=1, mini_batches=1, **changes)
    arguments = policy_arguments(files, zero, SMALL, algo=algo, optimizer=UNCLIPPED)
    found, gaps = [], []
    for own in (False, True):
        learners = ranks.make(world, "PolicyLearner", arguments | {"old_logprobs": "update" if own else "policy"})
        known = [replace(e, old_logprobs=e.behaviour_logprobs if own else
                         TokenScores.concat(learners.do("logprobs", make_rollout(e))).values) for e in experiences]
        before = learners.weights()
        gaps.append(learners.do("update", 0, COEF, *known)[0].metrics.get("logprob_gap"))
        found.append((before, learners.weights()))
        whole = known[0].concat(known)
    assert_same_update(found[0], *found[1])
    mask, exact = whole.response_mask, plain_logprobs(
        load_policy(files.tied), whole.tokens, whole.offsets, whole.response_mask)
    assert gaps == [None, pytest.approx(np.abs(exact - whole.behaviour_logprobs)[mask].mean(), rel=1e-3)]


def test_generators_logprobs_as_old_ones_are_compared_with_the_policy_before_its_first_step(ranks, files, experiences):
    """The update is that with the same numbers from a pass; the gap is of the weights before it, steps or not."""
    algo = AlgorithmConfig(epochs=1, mini_batches=2)
    told = [replace(e, old_logprobs=e.behaviour_logprobs) for e in experiences]
    found, gaps = [], []
    for old in ("policy", "generator"):
        learners = ranks.make(1, "PolicyLearner", {
            **policy_arguments(files, 1, SMALL, algo=algo, optimizer=UNCLIPPED), "old_logprobs": old})
        before = learners.weights()
        gaps.append(learners.do("update", 0, COEF, *told)[0].metrics.get("logprob_gap"))
        found.append((before, learners.weights()))
    assert_same_update(found[0], *found[1])
    whole = training_batch(told, whiten=False)
    first = whole.select(next(mini_batches(len(whole), 1, 2, SEED, 0)))
    exact = plain_logprobs(load_policy(files.tied), first.tokens, first.offsets, first.response_mask)
    expected = np.abs(exact - first.behaviour_logprobs)[first.response_mask].mean()
    assert gaps == [None, pytest.approx(expected, rel=1e-3)]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("zero", [1, 3])
def test_values_are_hugging_face_s_hidden_states_times_the_head_one_token_earlier(
    ranks, files, experiences, world, zero
):
    rollout = make_rollout(experiences[1])
    learners = ranks.make(world, "CriticLearner", critic_arguments(files, zero, SMALL))
    found = TokenScores.concat(learners.do("values", rollout))
    model = load_classifier(files.reward)
    with torch.no_grad():
        rows = [row_values(model, rollout.row(i, "tokens")).numpy() for i in range(len(rollout))]
    expected = np.where(rollout.response_mask, np.concatenate(rows), 0)
    assert np.array_equal(found.offsets, rollout.offsets)
    assert np.abs(found.values - expected).max() < 1e-5 and np.abs(expected).max() > 0.1


def test_a_rollout_with_fewer_rows_than_ranks_is_scored_whole(ranks, files, experiences):
    rollout = make_rollout(experiences[0]).select([0])
    for zero in (1, 3):
        learners = ranks.make(2, "PolicyLearner", policy_arguments(files, zero, SMALL))
        found = TokenScores.concat(learners.do("logprobs", rollout))
        expected = plain_logprobs(load_policy(files.tied), rollout.tokens, rollout.offsets, rollout.response_mask)
        assert np.abs(found.values - expected).max() < 1e-5


@pytest.mark.parametrize(("before", "after"), [((2, 1), (1, 1)), ((1, 2), (2, 2)), ((2, 3), (1, 3)), ((1, 3), (2, 3)),
                                               ((2, 0), (2, 3)), ((2, 2), (2, 0)), ((2, 3), (2, 1))], ids=str)
def test_another_number_of_ranks_at_another_stage_goes_on_with_the_same_state(
    ranks, files, experiences, tmp_path, before, after
):
    """The state as it was, number by number: saved again by the others it is the same. Then the next update, which
    differs by no more than the order of sums; and back."""
    worlds, found = [before, after, before], []
    for turn, (world, zero) in enumerate(worlds):
        arguments = policy_arguments(files, zero, SMALL)
        arguments["config"] = arguments["config"].model_copy(update={"ema_decay": 0.5})
        learners = ranks.make(world, "PolicyLearner", arguments)
        if turn == 0:
            learners.do("update", 0, 0.0, *experiences)
        else:
            learners.do("load", str(tmp_path / str(turn - 1)))
        learners.save(tmp_path / str(turn))
        start = learners.weights()
        stats = learners.do("update", 1, 0.0, *experiences)
        found.append((start, learners.weights(), stats[0].metrics["learning_rate"]))
    assert states(tmp_path / "0") == states(tmp_path / "1") == states(tmp_path / "2")
    for start, end, rate in found[1:]:
        assert rate == found[0][2]
        assert_same_update((found[0][0], found[0][1]), start, end)


@pytest.mark.parametrize("cls", ["PolicyLearner", "CriticLearner"])
@pytest.mark.parametrize(("zero", "compiled"), [(0, False), (1, False), (2, False), (3, False), (2, True)])
def test_after_save_and_load_in_new_processes_the_next_update_is_the_same_bit_for_bit(
    ranks, fresh_ranks, files, experiences, tmp_path, zero, compiled, cls
):
    arguments = (policy_arguments if cls == "PolicyLearner" else critic_arguments)(files, zero, SMALL)
    arguments["config"] = arguments["config"].model_copy(update={"compile_layers": compiled})
    learners = ranks.make(2, cls, arguments)
    assert ("as a whole" in learners.compiled) is compiled
    first, numbers = learners.weights(), (0.0,) if cls == "PolicyLearner" else ()
    learners.do("update", 0, *numbers, *experiences)
    learners.save(tmp_path)
    saved = learners.weights()
    uninterrupted = learners.do("update", 1, *numbers, *experiences)
    others = fresh_ranks.make(2, cls, arguments)
    assert all(np.array_equal(others.weights()[name], first[name]) for name in first), "new workers start afresh"
    others.do("load", str(tmp_path))
    assert all(np.array_equal(others.weights()[name], saved[name]) for name in saved)
    resumed = others.do("update", 1, *numbers, *experiences)
    ends = learners.weights(), others.weights()
    assert all(np.array_equal(ends[0][name], ends[1][name]) for name in saved)
    assert all(np.abs(ends[0][name] - saved[name]).max() > 0 for name in saved)
    assert resumed[0].metrics == uninterrupted[0].metrics


@pytest.mark.parametrize("zero", [0, 3])
def test_dropout_before_the_head_is_in_updates_only_and_goes_on_where_it_was_saved(
    ranks, files, experiences, tmp_path, zero
):
    """Values are those without it; after a checkpoint the next update is the same bit for bit."""
    arguments = critic_arguments(files, zero, SMALL)
    dropping = {**arguments, "config": arguments["config"].model_copy(update={"head_dropout": 0.3})}
    rollout, ends, found = make_rollout(experiences[0]), [], []
    for given in (arguments, dropping):
        learners = ranks.make(2, "CriticLearner", given)
        found.append([scores.values for scores in learners.do("values", rollout)])
        learners.do("update", 0, *experiences)
        ends.append(learners.weights())
    assert all(np.array_equal(*pair) for pair in zip(*found, strict=True))
    assert any(not np.array_equal(ends[0][name], ends[1][name]) for name in ends[0]), "or nothing was dropped"
    learners.save(tmp_path)
    following = learners.do("update", 1, *experiences)[0].metrics, learners.weights()
    resumed = ranks.make(2, "CriticLearner", dropping)
    resumed.do("load", str(tmp_path))
    assert resumed.do("update", 1, *experiences)[0].metrics == following[0]
    assert all(np.array_equal(following[1][name], weights) for name, weights in resumed.weights().items())


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_steps_with_a_loss_that_is_not_finite_are_left_out_by_all_ranks(ranks, files, experiences, zero, world):
    """Without whitening one advantage spoils one mini-batch of each epoch, and with it the row that one rank has."""
    arguments = policy_arguments(files, zero, SMALL, algo=algorithm(estimator={"type": "gae", "whiten": False}))
    learners = ranks.make(world, "PolicyLearner", arguments)
    before = learners.weights()
    stats = learners.do("update", 0, 0.0, *poisoned(experiences))
    assert [(s.applied, s.skipped) for s in stats] == [(2, 2)] * world
    assert np.isfinite(stats[0].metrics["loss"]), "what was left out is not in the means"
    batch = training_batch(experiences, whiten=False)
    expected = plain_update(load_policy(files.tied), batch, policy_terms, algorithm(), without=0)
    assert_same_update(expected, before, learners.weights())


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_update_beyond_its_target_kl_ends_with_all_ranks_at_the_same_step(
    ranks, files, experiences, zero, world, tmp_path
):
    """Of four steps two are made, as plain torch makes them; a copy from a checkpoint goes on to the same bits."""
    model, kls = load_policy(files.tied), []
    experiences = [replace(e, old_logprobs=plain_logprobs(model, e.tokens, e.offsets, e.response_mask))
                   for e in experiences]
    batch = training_batch(experiences, whiten=True)
    plain_update(model, batch, policy_terms, algorithm(), kls=kls)
    assert abs(kls[0]) < 1e-9 and 0 < 1.5 * kls[1] < kls[2], "or the steps cannot be told apart"
    algo = algorithm(target_kl=(kls[1] + kls[2]) / 2)
    expected = plain_update(load_policy(files.tied), batch, policy_terms, algo, steps=2)
    learners = ranks.make(world, "PolicyLearner", policy_arguments(files, zero, SMALL, algo=algo))
    before = learners.weights()
    stats = learners.do("update", 0, 0.0, *experiences)
    assert [(s.applied, s.skipped, s.metrics["optimizer_steps"]) for s in stats] == [(2, 0, 2.0)] * world
    assert_same_update(expected, before, learners.weights())
    learners.save(tmp_path)
    following = learners.do("update", 1, 0.0, *experiences)
    resumed = ranks.make(world, "PolicyLearner", policy_arguments(files, zero, SMALL, algo=algo))
    resumed.do("load", str(tmp_path))
    assert resumed.do("update", 1, 0.0, *experiences)[0].metrics == following[0].metrics


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_skipped_update_leaves_weights_and_optimizer_unchanged(ranks, files, experiences, zero, world):
    """Whitened, one advantage that is not finite makes all of them so. The next update has the result that it has
    without this one."""
    found = []
    for spoilt in (True, False):
        learners = ranks.make(world, "PolicyLearner", policy_arguments(files, zero, SMALL))
        learners.do("update", 0, 0.0, *experiences)
        if spoilt:
            before = learners.weights()
            stats = learners.do("update", 1, 0.0, *poisoned(experiences))
            assert [(s.applied, s.skipped) for s in stats] == [(0, 4)] * world
            after = learners.weights()
            assert all(np.array_equal(before[name], after[name]) for name in before)
        else:
            learners.leave_out(1)
        learners.do("update", 2, 0.0, *experiences)
        found.append(learners.weights())
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_gradient_that_is_not_finite_on_one_rank_stops_all_and_too_many_in_a_row_the_run(
    ranks, files, experiences, zero
):
    from rlhf_ray.errors import TrainingError

    optimizer = OPTIMIZER.model_copy(update={"max_consecutive_skipped_updates": 2})
    learners = ranks.make(2, "PolicyLearner", policy_arguments(files, zero, SMALL, optimizer=optimizer))
    before = learners.weights()
    learners.spoil(1)
    stats = learners.do("update", 0, 0.0, *experiences)
    assert [(s.applied, s.skipped) for s in stats] == [(0, 4)] * 2
    with pytest.raises(TrainingError, match="2 consecutive updates"):
        learners.do("update", 1, 0.0, *experiences)
    after = learners.weights()
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("world", "zero", "budget"), SUPERVISED)
def test_supervised_updates_are_plain_torch_s(ranks, files, world, zero, budget):
    train = make_sequences(1)
    learners = ranks.make(world, "SFTLearner", supervised_arguments(files.tied, zero, budget))
    before = learners.weights()
    learners.do("take", train, make_sequences(2))
    for step in (1, 2):
        learners.do("update", step)
    expected = plain_supervised(load_policy(files.tied), train, sft_loss)
    assert_same_update(expected, before, learners.weights())


@pytest.mark.parametrize("margins", [None, np.linspace(0, 2, 9, dtype=np.float32)], ids=["plain", "margins"])
@pytest.mark.parametrize(("world", "zero", "budget"), SUPERVISED)
def test_reward_model_updates_are_plain_torch_s(ranks, files, world, zero, budget, margins):
    train = Pairs(make_sequences(3), make_sequences(4), margins)
    learners = ranks.make(world, "RewardModelLearner", supervised_arguments(files.reward, zero, budget))
    before = learners.weights()
    learners.do("take", train, Pairs(make_sequences(5), make_sequences(6)))
    for step in (1, 2):
        learners.do("update", step)
    model = load_classifier(files.reward)
    with torch.no_grad():
        model.score.weight.copy_(torch.from_numpy(before["score.weight"].copy()))  # the learner's head is new
    expected = plain_supervised(model, train, pair_loss)
    assert_same_update(expected, before, learners.weights())


@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
@pytest.mark.parametrize(("world", "zero", "budget"), SUPERVISED)
def test_process_reward_updates_are_plain_torch_s(ranks, files, world, zero, budget, soft):
    train, held_out = make_step_rows(3, soft), make_step_rows(4, soft)
    arguments = {**supervised_arguments(files.tied, zero, budget), "steps": STEPS}
    learners = ranks.make(world, "ProcessRewardLearner", arguments)
    before = learners.weights()
    learners.do("take", train, held_out)
    with torch.no_grad():
        expected = float(step_loss(load_policy(files.tied), held_out))
    assert learners.do("evaluate")[0]["loss"] == pytest.approx(expected, rel=1e-5)
    for step in (1, 2):
        learners.do("update", step)
    assert_same_update(plain_supervised(load_policy(files.tied), train, step_loss), before, learners.weights())


def test_held_out_numbers_do_not_depend_on_the_ranks(ranks, files):
    held_out, found = make_sequences(2), []
    for world, budget in ((1, LARGE), (2, SMALL)):
        learners = ranks.make(world, "SFTLearner", supervised_arguments(files.tied, 1, budget))
        learners.do("take", make_sequences(1), held_out)
        found.append(learners.do("evaluate")[0]["loss"])
    with torch.no_grad():
        expected = float(sft_loss(load_policy(files.tied), held_out))
    assert found == pytest.approx([expected, expected], rel=1e-5)
