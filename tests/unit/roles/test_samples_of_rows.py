"""Samples of several rows: their rewards, baselines, advantages and summaries, and their share of the loss."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlhf_ray.algorithms.advantages import gae
from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.learner import PolicyConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.observability.sample_files import read_samples
from rlhf_ray.records import Episode, Prompts, RewardScores, RewardTerms, SampleKey, TokenScores, Turn, offsets_of
from rlhf_ray.rewards.environment_source import EnvironmentSource
from rlhf_ray.rewards.protocol import finished, requests_of, rollout_texts
from rlhf_ray.roles.assembler import Assembler
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.roles.ppo_update import Update, training_batch
from rlhf_ray.roles.reward_scorer import of_episodes
from tests.unit.roles.conftest import assemble_one, rollout_of

# Sample 0 is rows 0 and 1, sample 1 is row 2, sample 2 is rows 3 and 4; the first two are of one prompt.
MASKS = [[0, 1, 1], [0, 0, 1, 1, 1], [0, 1], [0, 1], [0, 0, 1]]
KEYS = [SampleKey(0, 4, 0), SampleKey(0, 4, 1), SampleKey(0, 9, 0)]
WEIGHTS = [0.4, 0.6, 1.0, 0.25, 0.75]
SCORES = [1.0, 3.0, 5.0]
STARTS, TOKENS_OF_SAMPLE = [0, 8, 10], [slice(0, 8), slice(8, 10), slice(10, 15)]
REASONS = ["stop", "length", "stop", "length", "stop"]


@pytest.fixture
def segments():
    """Five rows that are three samples."""
    return replace(rollout_of(MASKS, REASONS), keys=KEYS, samples=np.array([0, 0, 1, 2, 2]),
                   row_weights=np.array(WEIGHTS, np.float32))


def column_of(rollout, seed):
    random = np.random.default_rng(seed).normal(size=len(rollout.tokens))
    return TokenScores(rollout.offsets, np.where(rollout.response_mask, random, 0).astype(np.float32))


def assembled(rollout, model, scores=SCORES, coef=0.0, **changes):
    assembler = Assembler(AlgorithmConfig(**changes), model, 8)
    assembler.start()
    values = [column_of(rollout, 2)] if assembler.algorithm.has_critic else []
    return assemble_one(assembler, RewardTerms(coef), 1, rollout, RewardScores(np.array(scores, np.float32)),
                        column_of(rollout, 0), column_of(rollout, 1), *values)


def test_a_baseline_compares_samples(segments, policy_model):
    experience, _ = assembled(segments, policy_model, estimator="dr_grpo")
    # Prompt 4 has the scores 1 and 3 with mean 2, prompt 9 has 5 alone; counted by row, the mean would be 5 / 3.
    expected = np.where(segments.response_mask, np.repeat([-1.0, 1.0, 0.0], [8, 2, 5]), 0)
    assert experience.advantages.tolist() == expected.tolist()
    assert (experience.samples.tolist(), experience.keys) == ([0, 0, 1, 2, 2], KEYS)
    assert experience.row_weights.tobytes() == segments.row_weights.tobytes()


def test_advantages_run_over_a_samples_rows_one_after_the_other(segments, policy_model):
    experience, _ = assembled(segments, policy_model, coef=0.5, estimator={"type": "gae", "gamma": 0.9, "lam": 0.8})
    old, reference, values = (column_of(segments, seed).values.astype(np.float64) for seed in (1, 0, 2))
    for sample, tokens in enumerate(TOKENS_OF_SAMPLE):
        at = np.arange(len(old))[tokens][segments.response_mask[tokens]]
        advantage = following = 0.0
        for i in at[::-1]:
            reward = -0.5 * (old[i] - reference[i]) + (SCORES[sample] if i == at[-1] else 0)
            advantage = reward + 0.9 * following - values[i] + 0.9 * 0.8 * advantage
            following = values[i]
            assert experience.advantages[i] == pytest.approx(advantage, abs=1e-5)


def test_summaries_are_by_sample(segments, policy_model):
    experience, summary = assembled(segments, policy_model, estimator="dr_grpo")
    assert summary.response_lengths.tolist() == [5, 1, 2] and summary.finished.tolist() == [False, True, True]
    gap = experience.old_logprobs - experience.reference_logprobs
    assert summary.kl == pytest.approx([gap[tokens].sum() for tokens in TOKENS_OF_SAMPLE], abs=1e-5)
    assert summary.scores.tolist() == SCORES


def test_samples_of_several_rows_are_saved_as_one_each(segments, policy_model, tmp_path):
    experience, summary = assembled(segments, policy_model, estimator="dr_grpo")
    prompts = Prompts(offsets_of([1, 1]), np.zeros(2, np.int32), ["p9", "p4"], [{}, {}], np.array([9, 4]))
    assembler = Assembler(AlgorithmConfig(), policy_model, 8)
    assembler.start()
    asyncio.run(assembler.save_samples(str(tmp_path), None, 1, None, True, [summary], prompts, [experience]))
    rows = read_samples(tmp_path, 1)
    assert [row["token_ids"] for row in rows] == [segments.tokens[tokens].tolist() for tokens in TOKENS_OF_SAMPLE]
    assert [row["row_lengths"] for row in rows] == [[len(MASKS[0]), len(MASKS[1])], [len(MASKS[2])],
                                                    [len(MASKS[3]), len(MASKS[4])]]
    assert [row["finish_reason"] for row in rows] == ["length", "stop", "stop"]
    assert [(row["row"], row["sample"]) for row in rows] == [(key.row, key.sample) for key in KEYS]


def test_turns_of_episodes_are_saved_with_the_text_that_was_sampled(segments, policy_model, tmp_path):
    """A turn's tokens are in a row of its sample: the second turn of the first sample in the second row."""
    experience, summary = assembled(segments, policy_model, estimator="dr_grpo")
    places = [[(0, 1, 3), (1, 2, 5)], [], [(1, 2, 3)]]
    episodes = [Episode("shop", "completed", turns=[Turn(row, start, stop, 1, "stop") for row, start, stop in each])
                for each in places]
    prompts = Prompts(offsets_of([1, 1]), np.zeros(2, np.int32), ["p9", "p4"], [{}, {}], np.array([9, 4]))
    assembler = Assembler(AlgorithmConfig(), policy_model, 8)
    assembler.start()
    asyncio.run(assembler.save_samples(str(tmp_path), None, 1, None, True, [summary], prompts,
                                       [replace(experience, episodes=episodes)]))
    def words(row, places):
        """In this tokenizer each token is a word."""
        return " ".join(f"w{token}" for token in segments.row(row, "tokens")[places])

    assert [[turn["text"] for turn in saved["turns"]] for saved in read_samples(tmp_path, 1)] == [
        [words(0, slice(1, 3)), words(1, slice(2, 5))], [], [words(4, slice(2, 3))]]


def test_with_one_row_a_sample_advantages_have_the_bytes_of_the_estimate_by_row(policy_model):
    rollout = rollout_of(MASKS)
    estimator = {"type": "gae", "gamma": 0.9, "lam": 0.8}
    experience, _ = assembled(rollout, policy_model, SCORES + SCORES[:2], 0.5, estimator=estimator)
    counts = [sum(mask) for mask in MASKS]
    mask = torch.arange(max(counts)) < torch.tensor(counts)[:, None]

    def grid(values):
        cells = torch.zeros(mask.shape)
        cells[mask] = torch.from_numpy(values[rollout.response_mask])
        return cells

    old, reference, values = (grid(column_of(rollout, seed).values) for seed in (1, 0, 2))
    rewards = -0.5 * (old - reference)
    rewards[torch.arange(5), torch.tensor(counts) - 1] += torch.tensor(SCORES + SCORES[:2])
    for name, cells in zip(("advantages", "returns"), gae(rewards, values, mask, 0.9, 0.8), strict=True):
        assert getattr(experience, name)[rollout.response_mask].tobytes() == cells[mask].numpy().tobytes(), name


def test_a_sample_is_one_reward_request_with_the_tokens_of_all_its_rows(segments, policy_model):
    tokenizer = load_tokenizer(policy_model)
    prompts = Prompts(offsets_of([1, 1]), np.zeros(2, np.int32), ["p9", "p4"], [{}, {}], np.array([9, 4]))
    requests = requests_of(segments, prompts, tokenizer)
    assert [(r.key, r.prompt) for r in requests] == list(zip(KEYS, ["p4", "p4", "p9"], strict=True))
    for request, tokens in zip(requests, TOKENS_OF_SAMPLE, strict=True):
        assert request.tokens.tolist() == segments.tokens[tokens].tolist()
        assert request.response_mask.tolist() == segments.response_mask[tokens].tolist()
    assert [r.finish_reason for r in requests] == ["length", "stop", "stop"]
    assert finished(segments).tolist() == [False, True, True]
    parts = [tokenizer.decode(segments.tokens[place].tolist()) for place in (slice(1, 3), slice(5, 8))]
    assert requests[0].response == "\n".join(parts)
    opening, responses = rollout_texts(tokenizer, segments, 2)
    assert opening == [tokenizer.decode(segments.tokens[[start]].tolist()) for start in STARTS[:2]]
    assert responses == [r.response for r in requests[:2]]


def of_environment(rollout, episodes, tokenizer):
    """The scores of some episodes by the rewards of their environment, from the scorer's own parts."""
    prompts = Prompts(offsets_of([1, 1]), np.zeros(2, np.int32), ["p9", "p4"], [{}, {}], np.array([9, 4]))
    requests = requests_of(replace(rollout, episodes=episodes), prompts, tokenizer)
    kept = [i for i, episode in enumerate(episodes) if episode.use == "train"]
    answer = asyncio.run(EnvironmentSource().score([requests[i] for i in kept]))
    return of_episodes(RewardScores(answer.scores, token_rewards=answer.token_rewards), kept,
                       replace(rollout, episodes=episodes))


def episode_of(*turns, use="train"):
    """With turns of (row, start, stop, reward)."""
    return Episode("shop", "completed", use, turns=[
        Turn(row, start, stop, 1, "stop", reward=reward) for row, start, stop, reward in turns])


def test_the_reward_of_a_turn_is_on_the_last_token_that_was_sampled_in_it(policy_model):
    # The policy reads 1 token, samples 2, reads 2 (of a tool), samples 1, and reads 1 more at the end.
    rollout = rollout_of([[0, 1, 1, 0, 0, 1, 0], [0, 1]])
    rollout = replace(rollout, keys=KEYS[:2])
    episodes = [episode_of((0, 1, 3, 0.25), (0, 5, 6, 0.5)), episode_of((0, 1, 2, 0.0))]
    scores = of_environment(rollout, episodes, load_tokenizer(policy_model))
    assert scores.token_rewards.tolist() == [0, 0, 0.25, 0, 0, 0.5, 0, 0, 0]
    assert scores.scores.tolist() == [0.75, 0.0]


def test_turns_in_later_segments_have_their_rewards_there(segments, policy_model):
    episodes = [episode_of((0, 1, 3, 1.0), (1, 2, 5, 2.0)), episode_of((0, 1, 2, 4.0)),
                episode_of((0, 1, 2, 8.0), (1, 2, 3, 16.0))]
    scores = of_environment(segments, episodes, load_tokenizer(policy_model))
    assert scores.token_rewards.tolist() == [0, 0, 1, 0, 0, 0, 0, 2, 0, 4, 0, 8, 0, 0, 16]
    assert scores.scores.tolist() == [3.0, 4.0, 24.0]


def test_a_reward_of_zero_is_a_reward_and_a_masked_episode_has_none(segments, policy_model):
    """Prompt 4 has a score of 0 and one of 2: with the 0 taken for missing, its baseline would be 2 and not 1."""
    whole = [episode_of((0, 1, 3, 0.0), (1, 2, 5, 0.0)), episode_of((0, 1, 2, 2.0)), episode_of((0, 1, 2, 9.0))]
    tokenizer = load_tokenizer(policy_model)
    scores = of_environment(segments, whole, tokenizer)
    experience, _ = assembled(segments, policy_model, scores.scores, estimator="dr_grpo")
    assert scores.scores.tolist() == [0.0, 2.0, 9.0]
    assert [experience.advantages[at] for at in (1, 9)] == [-1.0, 1.0]
    masked = of_environment(segments, [replace(whole[0], use="mask"), *whole[1:]], tokenizer)
    assert np.isnan(masked.scores[0]) and masked.scores[1:].tolist() == [2.0, 9.0]
    zero = of_environment(segments, [whole[0], replace(whole[1], use="zero"), whole[2]], tokenizer)
    assert zero.scores.tolist() == [0.0, 0.0, 9.0] and zero.token_rewards[9] == 0


@pytest.mark.parametrize("estimator", ["dr_grpo", "rloo", "gae"])
def test_a_masked_episode_is_in_no_baseline_mean_or_loss(segments, policy_model, estimator):
    """The others have what they have where the masked one is not there at all."""
    with_it = replace(segments, episodes=[episode_of(), episode_of(use="mask"), episode_of()],
                      keys=[SampleKey(0, 4, 0), SampleKey(0, 4, 1), SampleKey(0, 4, 2)])
    without = with_it.select(with_it.rows_of(np.array([0, 2])))
    there, summary = assembled(with_it, policy_model, [1.0, np.nan, 5.0], 0.5, estimator=estimator)
    columns = [column_of(with_it, seed).select([0, 1, 3, 4]) for seed in (0, 1, 2)]
    assembler = Assembler(AlgorithmConfig(estimator=estimator), policy_model, 8)
    values = columns[2:] if assembler.algorithm.has_critic else []
    gone, _ = assemble_one(assembler, RewardTerms(0.5), 1, without,
                           RewardScores(np.array([1.0, 5.0], np.float32)), *columns[:2], *values)
    others = np.delete(np.arange(15), [8, 9])
    assert there.advantages[others].tolist() == gone.advantages.tolist() and not there.advantages[8:10].any()
    assert np.isnan(summary.kl[1]) and not np.isnan(summary.kl[[0, 2]]).any()
    assert there.counted.tolist() == [True, True, False, True, True]
    batch = training_batch([there], whiten=True)
    assert batch.advantages[others].tolist() == training_batch([gone], whiten=True).advantages.tolist()
    learner = PolicyLearner(PolicyConfig(), ModelConfig(path="m"), 0, 1, 0, 1, AlgorithmConfig(), 1.0, "update")
    chosen = learner.chosen_rows(batch)
    assert chosen.counted.tolist() == [0, 1, 3, 4] and 2 not in chosen.passed


def test_an_episode_of_no_reward_has_no_penalty_for_its_end_either(segments, policy_model):
    cut_off = replace(segments, finish_reasons=["length"] * 5, keys=[SampleKey(0, 4, i) for i in range(3)],
                      episodes=[episode_of(), episode_of(use="zero"), episode_of()])
    assembler = Assembler(AlgorithmConfig(missing_eos_penalty=2.0), policy_model, 8)
    scores = assembler._sample_scores(cut_off, torch.tensor([1.0, 0.0, 5.0]), RewardTerms(0.0), torch.tensor([3, 2, 2]))
    assert scores.tolist() == [-1.0, 0.0, 3.0]


def test_losses_by_sequence_weigh_samples_equally(segments, policy_model):
    batch = training_batch([assembled(segments, policy_model, estimator="reinforce", coef=0.5)[0]], whiten=False)
    algorithm = AlgorithmConfig(aggregate="sequence", importance={"tokens": "none"})
    learner = PolicyLearner(PolicyConfig(), ModelConfig(path="m"), 0, 1, 0, 1, algorithm, 1.0, "update")
    learner.engine = SimpleNamespace(
        device="cpu", forward=lambda tokens, packing, predicted, _, mask: (tokens[predicted] / 10, None))
    means = [batch.row(i, "advantages")[batch.row(i, "response_mask")].mean() for i in range(5)]
    # The log-probabilities are those of before the update, so that all ratios are 1.
    expected = -(0.4 * means[0] + 0.6 * means[1] + means[2] + 0.25 * means[3] + 0.75 * means[4]) / 3
    assert float(learner.loss(batch, Update()).loss) == pytest.approx(expected, abs=1e-6)
    assert learner.count(batch) == pytest.approx(3)
    cut = [batch.select(rows) for rows in ([0, 3, 2], [4, 1])]
    assert sum(float(learner.loss(part, Update()).loss) * learner.count(part) / 3 for part in cut) == pytest.approx(
        expected, abs=1e-6)
