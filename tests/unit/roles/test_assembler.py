"""Experience worked out by hand from two rollouts, and the numbers about it."""

import asyncio
import errno
import json
import math
import time
from dataclasses import fields, replace

import numpy as np
import pytest

from rlhf_ray.algorithms.logprob_gap import gap_quantile
from rlhf_ray.config.algorithm import AlgorithmConfig, KLConfig
from rlhf_ray.config.estimators import GAEEstimator
from rlhf_ray.errors import CheckpointError, DiskStalled, SupersededError
from rlhf_ray.failpoints import VARIABLE, hanging
from rlhf_ray.observability import sample_files
from rlhf_ray.observability.sample_files import read_samples
from rlhf_ray.records import (
    Experience,
    Prompts,
    RewardScores,
    RewardTerms,
    Rollout,
    SampleKey,
    TokenScores,
    offsets_of,
)
from rlhf_ray.roles.assembler import Assembler, bigram_codes, prompt_groups, stable_hash
from tests.unit.owners import take_over
from tests.unit.roles.conftest import assemble_one

KEYS = [SampleKey(0, 7, 0), SampleKey(0, 9, 0)]
# Row 0: prompt w2, response w3 w4 </s>. Row 1: prompt w5 w6, response w7, two inserted tokens, response w7, cut short.
TOKENS = [2, 3, 4, 1, 5, 6, 7, 8, 9, 7]
MASK = np.array([0, 1, 1, 1, 0, 0, 1, 0, 0, 1], dtype=bool)
OFFSETS = offsets_of([4, 6])
OLD = [0, -1.0, -2.0, -0.5, 0, 0, -1.5, 0, 0, -1.0]
REFERENCE = [0, -1.5, -1.0, -0.5, 0, 0, -2.5, 0, 0, -1.25]
VALUES = [0, 0.5, 1.0, 2.0, 0, 0, -1.0, 0, 0, 0.25]
BEHAVIOUR = [0, -1.1, -2.0, -0.5, 0, 0, -1.5, 0, 0, -1.2]
SCORES = [3.0, -2.0]
PROMPTS = Prompts(offsets_of([1, 2]), np.array([2, 5, 6], np.int32), ["w2", "w5 w6"], [{}, {}], np.array([7, 9]))
GAMMA, LAM, COEF, LONGEST = 0.9, 0.8, 0.5, 4


def column(values):
    return np.array(values, dtype=np.float32)


@pytest.fixture
def two_rows() -> Rollout:
    return Rollout(
        offsets=OFFSETS, tokens=np.array(TOKENS, dtype=np.int32), response_mask=MASK, logprobs=column(BEHAVIOUR),
        versions=np.array([-1, 3, 3, 4, -1, -1, 5, -1, -1, 5], dtype=np.int32), keys=KEYS,
        seeds=np.arange(2), finish_reasons=["stop", "length"],
    )


@pytest.fixture
def assemble(two_rows, policy_model):
    """assemble(gold, lambdas of GAE, **changes of the algorithm) -> (experience, summary)."""

    def run(gold=None, ranks=1, terms=RewardTerms(COEF), steps=None, referenced=True,  # noqa: B008
            components=None, lambdas=None, **changes):
        algorithm = AlgorithmConfig(estimator=GAEEstimator(gamma=GAMMA, lam=LAM, **lambdas or {}), **changes)
        assembler = Assembler(algorithm, policy_model, LONGEST)
        assembler.start()
        whole = [TokenScores(offsets=OFFSETS, values=column(c)) for c in (OLD, VALUES)]
        parts = {0: whole[1:], 1: whole, 2: [part.select([i]) for part in whole for i in (0, 1)]}[ranks]
        reference = TokenScores(offsets=OFFSETS, values=column(REFERENCE)) if referenced else None
        rewards = RewardScores(column(SCORES), components or {}, gold=gold,
                               token_rewards=None if steps is None else column(steps))
        return assemble_one(assembler, terms, ranks, two_rows, rewards, reference, *parts)

    return run


def expected_advantages(scores=SCORES, lams=(LAM, LAM), steps=(0,) * 10):
    """Equation 16 of Schulman et al. 2016, spelled out token by token; scores fall on last tokens, beside steps."""
    # Row 0, log-ratios 0.5, -1.0 and 0.0; the score lies on the last response token, which is </s>.
    r = [-COEF * 0.5 + steps[1], -COEF * -1.0 + steps[2], -COEF * 0.0 + steps[3] + scores[0]]
    v = VALUES[1:4]
    d = [r[0] + GAMMA * v[1] - v[0], r[1] + GAMMA * v[2] - v[1], r[2] - v[2]]
    c = GAMMA * lams[0]
    first = [d[0] + c * d[1] + c * c * d[2], d[1] + c * d[2], d[2]]
    # Row 1, log-ratios 1.0 and 0.25; the gap of two inserted tokens is stepped over undiscounted.
    r = [-COEF * 1.0 + steps[6], -COEF * 0.25 + steps[9] + scores[1]]
    v = [VALUES[6], VALUES[9]]
    d = [r[0] + GAMMA * v[1] - v[0], r[1] - v[1]]
    second = [d[0] + GAMMA * lams[1] * d[1], d[1]]
    return [0, *first, 0, 0, second[0], 0, 0, second[1]]


def test_advantages_and_returns_by_hand(assemble):
    experience, _ = assemble()
    advantages = expected_advantages()
    assert experience.advantages == pytest.approx(advantages, abs=1e-6)
    assert experience.returns == pytest.approx([a + v for a, v in zip(advantages, VALUES, strict=True)], abs=1e-6)
    assert experience.returns[~MASK].tolist() == [0] * 5


def test_columns_are_what_the_roles_said(assemble, two_rows):
    experience, _ = assemble()
    assert experience.tokens is two_rows.tokens and experience.response_mask is two_rows.response_mask
    for name, said in [("behaviour_logprobs", BEHAVIOUR), ("old_logprobs", OLD), ("reference_logprobs", REFERENCE),
                       ("values", VALUES)]:
        assert getattr(experience, name).tolist() == column(said).tolist(), name
    assert experience.keys == KEYS


def test_without_penalty_and_values_the_score_arrives_discounted(assemble, two_rows, policy_model):
    assembler = Assembler(AlgorithmConfig(estimator=GAEEstimator(gamma=0.5, lam=1.0)), policy_model, LONGEST)
    assembler.start()
    zero = TokenScores(offsets=OFFSETS, values=column([0] * 10))
    rewards = RewardScores(column([8.0, 4.0]))
    experience, _ = assemble_one(assembler, RewardTerms(0.0), 1, two_rows, rewards, zero, zero, zero)
    assert experience.returns.tolist() == [0, 2, 4, 8, 0, 0, 2, 0, 0, 4]


def test_the_score_is_clipped_and_the_penalty_is_not(assemble):
    experience, summary = assemble(reward_clip=1.0)
    assert experience.advantages == pytest.approx(expected_advantages([1.0, -1.0]), abs=1e-6)
    assert summary.scores.tolist() == SCORES, "the summary tells what the reward model said"


def test_a_response_that_did_not_end_pays(assemble):
    experience, summary = assemble(missing_eos_penalty=1.5)
    assert experience.advantages == pytest.approx(expected_advantages([3.0, -3.5]), abs=1e-6)
    assert summary.scores.tolist() == SCORES


def test_a_response_near_the_limit_pays_for_its_length(assemble):
    # The limit is 4 tokens: of a buffer of 2 a response of 3 tokens has used one half, one of 2 tokens nothing.
    experience, summary = assemble(overlong_buffer=2, overlong_penalty=3.0)
    assert experience.advantages == pytest.approx(expected_advantages([1.5, -2.0]), abs=1e-6)
    assert summary.scores.tolist() == SCORES


def test_scores_are_normalised_first_then_penalised_then_clipped(assemble):
    terms = RewardTerms(COEF, score_mean=1.0, score_deviation=2.0)
    experience, summary = assemble(terms=terms)
    assert experience.advantages == pytest.approx(expected_advantages([1.0, -1.5]), abs=1e-6)
    experience, summary = assemble(terms=terms, missing_eos_penalty=1.0, reward_clip=2.25)
    assert experience.advantages == pytest.approx(expected_advantages([1.0, -2.25]), abs=1e-6)
    assert summary.scores.tolist() == SCORES


STEPS = [0, 1.0, 0, 0.5, 0, 0, -3.0, 0, 0, 0]
"""Rewards of single tokens: of the scores 3 and -2 they leave 1.5 and 1 to the last tokens."""


def test_what_single_tokens_leave_of_the_score_falls_on_the_last(assemble):
    experience, summary = assemble(steps=STEPS)
    assert experience.advantages == pytest.approx(expected_advantages([1.5, 1.0], steps=STEPS), abs=1e-6)
    assert summary.scores.tolist() == SCORES


def test_token_rewards_are_scaled_like_the_scores_whose_mean_is_taken_off_once(assemble):
    experience, _ = assemble(steps=STEPS, terms=RewardTerms(COEF, score_mean=1.0, score_deviation=2.0))
    expected = expected_advantages([(1.5 - 1) / 2, 0.0], steps=[s / 2 for s in STEPS])
    assert experience.advantages == pytest.approx(expected, abs=1e-6)


def test_every_token_s_reward_is_clipped_by_itself(assemble):
    experience, _ = assemble(steps=STEPS, reward_clip=0.75)
    clipped = [max(-0.75, min(0.75, s)) for s in STEPS]
    assert experience.advantages == pytest.approx(expected_advantages([0.75, 0.75], steps=clipped), abs=1e-6)


def test_token_rewards_of_padding_and_gaps_do_not_exist(assemble):
    loud = [9.0 if not m else s for s, m in zip(STEPS, MASK, strict=True)]
    one, other = assemble(steps=STEPS)[0], assemble(steps=loud)[0]
    assert one.advantages.tolist() == other.advantages.tolist()


def test_lambda_may_follow_the_length(assemble):
    experience, _ = assemble(lambdas={"lam_alpha": 0.8})  # 1 - 1 / (0.8 * 3) and 1 - 1 / (0.8 * 2) for 3 and 2 tokens
    assert experience.advantages == pytest.approx(expected_advantages(lams=(1 - 1 / 2.4, 1 - 1 / 1.6)), abs=1e-6)


def test_the_critic_may_learn_with_a_lambda_of_its_own(assemble):
    experience, _ = assemble(lambdas={"lam_critic": 1.0})
    assert experience.advantages == pytest.approx(expected_advantages(), abs=1e-6)
    unbiased = [a + v for a, v in zip(expected_advantages(lams=(1, 1)), VALUES, strict=True)]
    assert experience.returns == pytest.approx(unbiased, abs=1e-6)


@pytest.mark.parametrize("estimator, kl", [("k2", 0.5), ("abs", 1.0), ("k3", math.exp(-1.0) - 1 + 1.0)])
def test_the_estimator_is_the_configured_one(assemble, estimator, kl):
    experience, _ = assemble(kl=KLConfig(estimator=estimator), reward_clip=1e-9)
    last = experience.advantages[9]  # of the one-step-to-go token: only its own reward counts
    ratio = 0.25
    own = {"k2": ratio**2 / 2, "abs": ratio, "k3": math.exp(-ratio) - 1 + ratio}[estimator]
    assert last == pytest.approx(-COEF * own - VALUES[9], abs=1e-6)
    delta = -COEF * kl + GAMMA * VALUES[9] - VALUES[6]
    assert experience.advantages[6] == pytest.approx(delta + GAMMA * LAM * last, abs=1e-6)


def test_gdpo_weighs_the_components_of_the_score_by_the_rewards_own_weights(two_rows, policy_model):
    """In the order of the weights, not in that of the components; the sum and its penalties are not read."""
    algorithm = AlgorithmConfig(estimator={"type": "gdpo"})
    assembler = Assembler(algorithm, policy_model, LONGEST, reward_weights={"quality": 2.0, "format": 0.5})
    prompt = replace(two_rows, keys=[SampleKey(0, 7, 0), SampleKey(0, 7, 1)])
    rewards = RewardScores(column([9.0, 9.0]), {"format": column([0.0, 4.0]), "quality": column([3.0, 1.0])})
    experience, _ = assemble_one(assembler, RewardTerms(COEF), 0, prompt, rewards, None)
    # Two numbers d apart are each d / 2 from their mean, and their deviation (n-1) is d / sqrt(2).
    expected = 2.0 * 1 / (2**0.5 + 1e-4) - 0.5 * 2 / (8**0.5 + 1e-4)
    assert experience.advantages[MASK] == pytest.approx([expected] * 3 + [-expected] * 2, rel=1e-6)
    assert not experience.advantages[~MASK].any()


def test_parts_of_several_ranks_are_put_together(assemble):
    one, _ = assemble(ranks=1)
    two, _ = assemble(ranks=2)
    assert two.advantages.tolist() == one.advantages.tolist()
    assert two.old_logprobs.tolist() == one.old_logprobs.tolist()


def test_without_a_pass_of_the_policy_the_generators_numbers_are_the_old_ones(assemble):
    experience, summary = assemble(ranks=0)
    assert experience.old_logprobs.tolist() == column(BEHAVIOUR).tolist()
    assert experience.values.tolist() == column(VALUES).tolist() and summary.behaviour_gap == 0
    ratio = column(BEHAVIOUR) - column(REFERENCE)
    assert summary.kl == pytest.approx([ratio[1:4].sum(), ratio[6] + ratio[9]])


def test_without_a_critic_gae_refuses(two_rows, policy_model):
    assembler = Assembler(AlgorithmConfig(), policy_model, LONGEST)
    assembler.start()
    scores = TokenScores(offsets=OFFSETS, values=column(OLD))
    with pytest.raises(ValueError, match="needs a critic"):
        assemble_one(assembler, RewardTerms(0.1), 1, two_rows, RewardScores(column(SCORES)), scores, scores)


def grouped(two_rows, policy_model, **changes):
    """Experience of the two rows as samples of one prompt, without a critic; coefficient COEF."""
    assembler = Assembler(AlgorithmConfig(**changes), policy_model, LONGEST)
    assembler.start()
    rollout = replace(two_rows, keys=[SampleKey(0, 7, 0), SampleKey(0, 7, 1)])
    old, reference = (TokenScores(offsets=OFFSETS, values=column(c)) for c in (OLD, REFERENCE))
    return assemble_one(assembler, RewardTerms(COEF), 1, rollout, RewardScores(column(SCORES)), reference, old)[0]


def test_samples_of_a_prompt_are_compared_without_a_critic_and_without_the_kl(two_rows, policy_model):
    experience = grouped(two_rows, policy_model, estimator="dr_grpo")  # the mean of 3 and -2 is 1/2
    assert experience.values is None
    assert experience.advantages.tolist() == [0, 2.5, 2.5, 2.5, 0, 0, -2.5, 0, 0, -2.5]


def test_the_kl_in_the_reward_is_part_of_what_is_compared(two_rows, policy_model):
    experience = grouped(two_rows, policy_model, estimator="rloo", kl=KLConfig(placement="reward"))
    totals = [3.0 - COEF * -0.5, -2.0 - COEF * 1.25]
    gap = totals[0] - totals[1]
    assert experience.advantages == pytest.approx([0, gap, gap, gap, 0, 0, -gap, 0, 0, -gap])


def test_the_kl_in_the_loss_leaves_the_rewards_alone(two_rows, policy_model):
    estimator = {"type": "reinforce", "gamma": GAMMA}
    experience = grouped(two_rows, policy_model, estimator=estimator, kl=KLConfig(placement="loss"))
    assert experience.advantages == pytest.approx([0, 3 * 0.81, 3 * 0.9, 3, 0, 0, -2 * 0.9, 0, 0, -2], abs=1e-6)
    assert experience.returns.tolist() == experience.advantages.tolist()


def test_groups_are_prompts_of_one_epoch():
    keys = [SampleKey(0, 5, 0), SampleKey(0, 5, 1), SampleKey(1, 5, 0), SampleKey(0, 2, 0), SampleKey(1, 5, 1)]
    assert prompt_groups(keys).tolist() == [0, 0, 1, 2, 1]


def test_the_summarys_numbers_by_hand(assemble):
    experience, summary = assemble()
    assert summary.kl.tolist() == [0.5 - 1.0 + 0.0, 1.0 + 0.25]
    assert summary.response_lengths.tolist() == [3, 2] and summary.response_lengths.dtype.kind == "i"
    assert summary.finished.tolist() == [True, False]
    assert (summary.min_version, summary.tokens, summary.nbytes) == (3, 10, experience.nbytes)
    assert summary.behaviour_gap == pytest.approx((0.1 + 0.2) / 5, abs=1e-6)
    assert summary.gap_histogram.sum() == 5
    assert [gap_quantile(summary.gap_histogram, share) for share in (0.6, 0.8, 1)] == pytest.approx(
        [1e-7, 0.1, 0.2], rel=0.27)
    assert summary.gold is None


@pytest.fixture
def saved(assemble, policy_model, tmp_path):
    """saved(prompts, how many prompts, old_known, **arguments of assemble) -> the rows of the file of step 7."""

    def run(prompts=PROMPTS, prompts_saved=None, old_known=True, **arguments):
        experience, summary = assemble(**arguments)
        assembler = Assembler(AlgorithmConfig(), policy_model, LONGEST)
        assembler.start()
        size, seconds = asyncio.run(assembler.save_samples(
            str(tmp_path), None, 7, prompts_saved, old_known, [summary], prompts, [experience]))
        assert (size, seconds > 0) == ((tmp_path / "step_000007.parquet").stat().st_size, True)
        return read_samples(tmp_path, 7)

    return run


def test_saved_samples_have_texts_and_all_that_is_known_of_each_token(saved):
    first, second = saved(gold=column([0.25, -0.5]), components={"a": column([1.0, 2.0])})
    assert {name: first[name] for name in ("step", "epoch", "row", "sample", "prompt", "messages", "response", "score",
                                           "reward/a", "kl", "gold", "finish_reason", "row_lengths")} == {
        "step": 7, "epoch": 0, "row": 7, "sample": 0, "prompt": "w2", "messages": None, "response": "w3 w4",
        "score": 3.0, "reward/a": 1.0, "kl": -0.5, "gold": 0.25, "finish_reason": "stop", "row_lengths": [4]}
    assert (second["response"], second["score"], second["finish_reason"]) == ("w7\nw7", -2.0, "length")
    assert second["token_ids"] == TOKENS[4:] and second["token_texts"] == [f"w{i}" for i in TOKENS[4:]]
    assert second["response_mask"] == MASK[4:].tolist() and second["versions"] == [-1, -1, 5, -1, -1, 5]
    for name, values in (("behaviour_logprobs", BEHAVIOUR), ("old_logprobs", OLD), ("reference_logprobs", REFERENCE)):
        assert second[name] == column(values[4:]).tolist(), name


def test_saved_advantages_are_those_of_the_experience(saved, assemble):
    experience, _ = assemble()
    assert [value for row in saved() for value in row["advantages"]] == experience.advantages.tolist()


def test_what_nobody_computed_is_null_in_saved_samples(saved):
    rows = saved(old_known=False, referenced=False, terms=RewardTerms(0.0), kl={"coef": 0.0})
    assert [(row["old_logprobs"], row["reference_logprobs"], row["kl"], row["gold"]) for row in rows] == [
        (None, None, None, None)] * 2


def test_the_samples_of_the_first_prompts_are_saved(saved):
    assert [row["row"] for row in saved(prompts_saved=1)] == [7]


def test_a_conversation_is_saved_as_its_messages(saved):
    """Also if a message has half of a surrogate pair, which is not valid Unicode."""
    messages = [{"role": "user", "content": "half \ud83d"}]
    rows = saved(replace(PROMPTS, messages=[messages, None]))
    assert [row["messages"] and json.loads(row["messages"]) for row in rows] == [messages, None]


def test_saving_on_a_disk_that_hangs_ends_by_the_files_name(assemble, policy_model, tmp_path, monkeypatch):
    experience, summary = assemble()
    assembler = Assembler(AlgorithmConfig(), policy_model, LONGEST, disk_timeout_s=0.2)
    assembler.start()
    monkeypatch.setenv(VARIABLE, "fsync@step_000001.parquet:hang")
    with pytest.raises(DiskStalled, match=r"flush \S*step_000001.parquet has made no progress"):
        asyncio.run(assembler.save_samples(str(tmp_path), None, 1, None, True, [summary], PROMPTS, [experience]))
    monkeypatch.delenv(VARIABLE)
    while hanging():
        time.sleep(0.01)


def test_a_full_disk_is_named_with_its_remedy(assemble, policy_model, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    experience, summary = assemble()
    assembler = Assembler(AlgorithmConfig(), policy_model, LONGEST)
    assembler.start()
    monkeypatch.setattr(sample_files, "write_atomically", full)
    with pytest.raises(CheckpointError, match=r"the disk is full: the samples of step 1 .*\(logging.samples\)"):
        asyncio.run(assembler.save_samples(str(tmp_path), None, 1, None, True, [summary], PROMPTS, [experience]))


def test_a_late_assembler_of_a_superseded_driver_writes_no_samples(assemble, policy_model, tmp_path):
    experience, summary = assemble()
    term = take_over(tmp_path)
    take_over(tmp_path)
    assembler = Assembler(AlgorithmConfig(), policy_model, LONGEST)
    assembler.start()
    with pytest.raises(SupersededError):
        asyncio.run(assembler.save_samples(str(tmp_path / "samples"), term, 1, None, True, [summary], PROMPTS,
                                           [experience]))
    assert list((tmp_path / "samples").iterdir()) == []


def test_an_evaluation_has_the_judges_scores_of_its_responses(two_rows, policy_model):
    assembler = Assembler(AlgorithmConfig(), policy_model, LONGEST)
    assembler.start()
    rewards = RewardScores(column(SCORES), gold=column([0.25, -0.5]))
    part = assembler.measure(0, two_rows, [rewards], TokenScores(OFFSETS, column(REFERENCE)))
    assert part.gold.tolist() == [0.25, -0.5]


def test_a_judges_scores_are_in_the_summary(assemble):
    experience, summary = assemble(gold=column([0.25, -0.5]))
    assert summary.gold.tolist() == [0.25, -0.5]
    assert np.array_equal(experience.advantages, assemble()[0].advantages), "the policy does not learn from it"


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_without_a_reference_experience_is_as_with_one_and_no_coefficient_and_no_kl_is_told(assemble, placement):
    changes = {"terms": RewardTerms(0.0), "kl": {"coef": 0.0, "placement": placement}}
    (one, told), (other, without) = assemble(**changes), assemble(**changes, referenced=False)
    for name in ("advantages", "returns", "old_logprobs", "behaviour_logprobs", "values"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert one.reference_logprobs is not None and told.kl is not None
    assert other.reference_logprobs is None and without.kl is None


def test_an_evaluation_without_a_reference_has_neither_kl_nor_perplexity(two_rows, policy_model):
    assembler = Assembler(AlgorithmConfig(), policy_model, LONGEST)
    assembler.start()
    part = assembler.measure(0, two_rows, [RewardScores(column(SCORES))], None)
    metrics, _ = assembler.sum_up(True, {}, None, part)
    assert part.kl is None and part.reference_logprobs is None
    assert not {"kl", "perplexity"} & set(metrics) and metrics["reward"] == pytest.approx(np.mean(SCORES))


def test_an_evaluation_part_by_hand(two_rows, policy_model):
    assembler = Assembler(AlgorithmConfig(), policy_model, LONGEST)
    assembler.start()
    reference = TokenScores(offsets=OFFSETS, values=column(REFERENCE))
    part = assembler.measure(1, two_rows, [RewardScores(column(SCORES))], reference)
    assert part.scores.tolist() == SCORES and part.gold is None
    assert part.kl == pytest.approx([(-1.1 + 1.5) + (-2.0 + 1.0) + 0.0, (-1.5 + 2.5) + (-1.2 + 1.25)], abs=1e-6)
    assert part.reference_logprobs == pytest.approx([-3.0, -3.75])
    assert part.lengths.tolist() == [3, 2] and part.finished.tolist() == [True, False]
    assert part.digests.tolist() == [stable_hash("w3 w4"), stable_hash("w7\nw7")]
    assert part.bigrams.tolist() == [3 * 2**31 + 4, 4 * 2**31 + 1, 7 * 2**31 + 7]
    assert part.texts == [{"prompt": "w2", "response": "w3 w4"}]


def test_an_evaluations_texts_have_the_messages_of_conversations(two_rows, policy_model):
    assembler = Assembler(AlgorithmConfig(), policy_model, LONGEST)
    assembler.start()
    messages = [{"role": "user", "content": "w2"}]
    part = assembler.measure(2, two_rows, [RewardScores(column(SCORES))], None,
                             replace(PROMPTS, messages=[messages, None]))
    assert [text.get("messages") for text in part.texts] == [messages, None]


def test_hashes_are_stable_and_fit_63_bits():
    assert stable_hash("") == 0xE4A6A0577479B2B4 >> 1  # blake2b-64 of nothing
    assert all(0 <= stable_hash(str(i)) < 2**63 for i in range(100))


def test_bigrams_tell_order_and_large_ids_apart():
    ids = np.array([1, 2, 1, 2**31 - 1, 0], dtype=np.int32)
    codes = bigram_codes(ids)
    assert len(set(codes.tolist())) == 4 and codes.dtype == np.int64
    assert bigram_codes(ids[:1]).tolist() == []


def test_experience_comes_back_from_disk(assemble, policy_model, tmp_path):
    experience, _ = assemble()
    assembler = Assembler(AlgorithmConfig(), policy_model, LONGEST)
    assembler.save(str(tmp_path / "e.npz"), experience)
    again = assembler.load(str(tmp_path / "e.npz"))
    assert isinstance(again, Experience) and again.keys == experience.keys
    assert again.advantages.tobytes() == experience.advantages.tobytes()


@pytest.mark.parametrize("ranks", [0, 1, 2, 3])
def test_rollouts_assembled_in_company_become_what_each_becomes_alone(two_rows, policy_model, ranks):
    """The ranks' shares are cut from all rows in a line, wherever a rollout ends; 0 made no pass for old ones."""
    assembler = Assembler(AlgorithmConfig(estimator=GAEEstimator(gamma=GAMMA, lam=LAM)), policy_model, LONGEST)
    assembler.start()
    rollouts = [two_rows.select([1]), two_rows, two_rows.select([0])]
    rewards = [RewardScores(column(SCORES[1:])), RewardScores(column(SCORES)), RewardScores(column(SCORES[:1]))]

    def parts_of(told):
        whole = TokenScores(OFFSETS, column(told))
        return [whole.select([1]), whole, whole.select([0])]

    def shares(told):
        line = TokenScores.concat(parts_of(told))
        return [line.select(rows) for rows in np.array_split(np.arange(4), max(1, ranks))]

    old = (OLD,) if ranks else ()

    *together, summaries = assembler.assemble(
        RewardTerms(COEF), rollouts, rewards, TokenScores.concat(parts_of(REFERENCE)),
        [share for told in old for share in shares(told)], shares(VALUES))
    assert [len(summary.scores) for summary in summaries] == [1, 2, 1]
    told = zip(*(parts_of(numbers) for numbers in (REFERENCE, *old, VALUES)), strict=True)
    for i, scores in enumerate(told):
        alone, summary = assemble_one(assembler, RewardTerms(COEF), min(1, ranks), rollouts[i], rewards[i], *scores)
        for name in (field.name for field in fields(Experience)):
            assert np.array_equal(getattr(together[i], name), getattr(alone, name)), name
        assert summaries[i].min_version == summary.min_version and summaries[i].kl.tolist() == summary.kl.tolist()


def three_groups():
    """Samples of three prompts, the second's of two rows each; their rewards; a reference's log-probabilities."""
    keys = [SampleKey(0, row, sample) for row in (7, 9, 8) for sample in (0, 1)]
    lengths = [2, 3, 2, 2, 2, 2, 4, 2]  # the third and fourth sample have two rows each
    offsets = offsets_of(lengths)
    count = int(offsets[-1])
    rollout = Rollout(
        offsets=offsets, tokens=np.arange(count, dtype=np.int32), response_mask=np.ones(count, bool),
        logprobs=-np.arange(count, dtype=np.float32), versions=np.zeros(count, np.int32), keys=keys,
        seeds=np.arange(8), finish_reasons=["stop"] * 8, samples=np.array([0, 1, 2, 2, 3, 3, 4, 5]))
    rewards = RewardScores(
        column([1, 0, 2, 2, 0.5, 0.5]), {"a": column([1, 0, 1, 1, 0, 0.5]), "b": column([0, 0, 1, 1, 0.5, 0])},
        token_rewards=np.arange(count, dtype=np.float32), gold=column([1, 2, 3, 4, 5, 6]))
    return rollout, rewards, TokenScores(offsets=offsets, values=10.0 * np.arange(count, dtype=np.float32))


def sifting(policy_model, estimator, **weights):
    return Assembler(AlgorithmConfig(estimator=estimator), policy_model, LONGEST, reward_weights=weights)


@pytest.mark.parametrize(("estimator", "weights", "kept"), [
    ("grpo", {"a": 1, "b": 1}, [0, 1]), ("gdpo", {"a": 1, "b": 1}, [0, 1, 4, 5]), ("gdpo", {"a": 0, "b": 1}, [4, 5])])
def test_samples_of_prompts_with_equal_scores_are_sifted_out(policy_model, estimator, weights, kept):
    """With gdpo by each component that has a weight."""
    rollout, rewards, _ = three_groups()
    sifted, = sifting(policy_model, estimator, **weights).sift([rollout.keys], [rewards])
    assert sifted.kept == kept
    gone = [number for number in range(6) if number not in kept]
    assert sifted.others == {name: [values[number] for number in gone] for name, values in {
        "score": [1, 0, 2, 2, 0.5, 0.5], "reward/a": [1, 0, 1, 1, 0, 0.5], "reward/b": [0, 0, 1, 1, 0.5, 0],
        "gold": [1, 2, 3, 4, 5, 6]}.items()}


def test_kept_samples_keep_their_rows_scores_and_reference(policy_model):
    """Of three rollouts that were scored together, one with all samples and one without any."""
    rollout, rewards, reference = three_groups()
    several = TokenScores.concat([reference] * 3)
    first, third, each_rewards, ref = sifting(policy_model, "grpo").keep_samples(
        [[2, 5], [], range(6)], [rollout] * 3, [rewards] * 3, several)
    rows = [2, 3, 7]
    tokens = np.concatenate([rollout.row(row, "tokens") for row in rows])
    assert first.keys == [rollout.keys[2], rollout.keys[5]] and first.samples.tolist() == [0, 0, 1]
    assert first.tokens.tolist() == tokens.tolist() and third.tokens.tolist() == rollout.tokens.tolist()
    assert each_rewards[0].scores.tolist() == [2, 0.5] and each_rewards[0].gold.tolist() == [3, 6]
    assert each_rewards[0].token_rewards.tolist() == tokens.tolist()
    components = {name: values.tolist() for name, values in each_rewards[0].components.items()}
    assert components == {"a": [1, 0.5], "b": [1, 0]}
    assert ref.values.tolist() == [*(10.0 * tokens), *reference.values]
    *_, none = sifting(policy_model, "grpo").keep_samples([[2, 5]], [rollout], [rewards], None)
    assert none is None
