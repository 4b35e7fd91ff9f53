"""The frozen models against transformers' own outputs; a score that is no number is an error."""

import asyncio
import shutil
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_ray.config.rewards import ExactMatchReward, FunctionReward, ModelReward
from rlhf_ray.config.scorer_names import scorer_rewards
from rlhf_ray.errors import RewardError, UnscoredSamples
from rlhf_ray.records import Prompts, offsets_of
from rlhf_ray.roles.micro_batch import split_scores
from rlhf_ray.roles.reference_scorer import ReferenceScorer
from rlhf_ray.roles.reward_scorer import RewardScorer


def reward(path, **fields):
    return ModelReward(type="model", path=path, **fields)


def scored(rollout, policy, rewards, budget=1000, judge=None, **settings):
    """What a reward scorer says of the rollout, in an order of prompts that is not the rollout's."""
    order = list(reversed(range(len(rollout))))
    prompts = Prompts(
        offsets=offsets_of(np.ones(len(rollout))), tokens=np.zeros(len(rollout), dtype=np.int32),
        rows=np.array(order), texts=[f"prompt {i}" for i in order], metadata=[{"answer": str(i)} for i in order])

    async def ask():
        scorer = RewardScorer(rewards, policy, budget, judge=judge, **settings)
        try:
            await scorer.start()
            return await scorer.score(rollout, prompts)
        finally:
            await scorer.stop()

    return asyncio.run(ask())


def test_rollouts_scored_together_get_what_each_gets_alone(rollout, policy_model):
    scorer, began = ReferenceScorer(policy_model, 1000, 1.0), time.perf_counter()
    compared = scorer.start()
    assert compared.keys() == {"probe_seconds", "probe_difference"}
    assert 0 < compared["probe_seconds"] <= time.perf_counter() - began
    parts = [rollout.select(rows) for rows in np.array_split(np.arange(len(rollout)), 3)]
    together = scorer.logprobs(parts)
    for part, scores in zip(parts, split_scores(together, parts), strict=True):
        assert np.array_equal(scores.offsets, part.offsets)
        assert np.abs(scores.values - scorer.logprobs([part]).values).max() < 1e-5


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("budget", [6, 1000])
def test_the_reference_says_what_transformers_says(rollout, policy_model, transformers_model, temperature, budget):
    scorer = ReferenceScorer(policy_model, budget, temperature)
    scorer.start()
    scores = scorer.logprobs([rollout])
    model = transformers_model("AutoModelForCausalLM", policy_model.path)
    for i in range(len(rollout)):
        tokens = torch.from_numpy(rollout.row(i, "tokens").astype(np.int64))
        with torch.no_grad():
            logprobs = (model(tokens[None]).logits[0] / temperature).log_softmax(-1)
        expected = np.zeros(len(tokens))
        expected[1:] = logprobs[:-1].gather(-1, tokens[1:, None])[:, 0]
        expected[~rollout.row(i, "response_mask")] = 0
        assert scores.row(i, "values") == pytest.approx(expected, abs=1e-5)
    assert not scores.values[~rollout.response_mask].any()


@pytest.mark.parametrize("budget", [6, 1000])
def test_the_reward_model_says_what_transformers_says(
    rollout, policy_model, reward_model, transformers_model, budget
):
    answer = scored(rollout, policy_model, {"main": reward(reward_model.path)}, budget)
    scores = answer.scores
    model = transformers_model("AutoModelForSequenceClassification", reward_model.path)
    for i, score in enumerate(scores):
        with torch.no_grad():
            tokens = torch.from_numpy(rollout.row(i, "tokens").astype(np.int64))
            assert score == pytest.approx(model(tokens[None]).logits.item(), abs=1e-5)
    assert scores.dtype == np.float32 and len(set(scores.tolist())) == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_an_error_that_names_the_samples(
    rollout, policy_model, reward_model, tmp_path, bad
):
    directory = shutil.copytree(reward_model.path, tmp_path / "damaged")
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][rollout.row(1, "tokens")[-1]] = bad
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    only_there = rollout.row(1, "tokens")[-1] not in [*rollout.row(0, "tokens"), *rollout.row(2, "tokens")]
    assert only_there, "the damaged token should be in one row alone"
    said = r"(?s)damaged' \(rewards\.main\) gave nan for 1 of 3 responses\n  prompt: 'prompt 1'\n  response: .*"
    said += r"\nA missing score.*reward.on_failure=quarantine$"
    with pytest.raises(RewardError, match=said):
        scored(rollout, policy_model, {"main": reward(str(directory))})


def test_a_sample_that_the_judge_cannot_score_is_named_where_prompts_may_leave(
    rollout, policy_model, reward_model, tmp_path
):
    """It ends the run only where nothing may be quarantined."""
    (tmp_path / "odd.py").write_text(
        "def score(prompts, responses, **_):\n    return [float('nan') if p.endswith('1') else 1.0 for p in prompts]\n")
    judge = {"judge": FunctionReward(type="function", function=f"{tmp_path}/odd.py:score")}
    main = {"main": reward(reward_model.path)}
    with pytest.raises(UnscoredSamples) as caught:
        scored(rollout, policy_model, main, judge=judge, on_failure="quarantine")
    assert [sample.key for sample in caught.value.samples] == [rollout.keys[1]]
    with pytest.raises(RewardError, match=r"on_failure=quarantine$"):
        scored(rollout, policy_model, main, judge=judge)


def test_components_are_weighed_and_added_up(rollout, policy_model, reward_model, tmp_path):
    (tmp_path / "mine.py").write_text("def digits(labels, prompts): return [float(row['answer']) + len(p) for row, p "
                                      "in zip(labels, prompts)]")
    answer = scored(rollout, policy_model, {
        "model": reward(reward_model.path, weight=2.0),
        "mine": FunctionReward(type="function", function=f"{tmp_path}/mine.py:digits", weight=-0.5),
        "match": ExactMatchReward(type="exact_match", weight=3.0, wrong=0.25),
    })
    parts = answer.components
    assert parts["mine"].tolist() == [8.0, 9.0, 10.0], "of each row its own label and prompt"
    assert parts["match"].tolist() == [0.25] * 3 and answer.failures == {"model": 0, "mine": 0, "match": 0}
    expected = 2.0 * parts["model"].astype(float) - 0.5 * parts["mine"] + 3.0 * parts["match"]
    assert answer.scores == pytest.approx(expected, rel=1e-6)
    assert answer.scores.dtype == np.float32 and answer.token_rewards is None


def test_a_single_model_s_score_is_its_own_to_the_bit(rollout, policy_model, reward_model):
    answer = scored(rollout, policy_model, {"main": reward(reward_model.path)})
    assert answer.scores.tobytes() == answer.components["main"].tobytes()


@pytest.mark.parametrize("name", ["model", "number", "yaml"])
def test_a_judge_scores_every_response_and_changes_no_reward(name, rollout, policy_model, reward_model, tmp_path):
    """Any scorer: a model, a rule that reads the prompts' answers, a weighted sum."""
    (tmp_path / "sum.yaml").write_text("rewards: {a: {type: exact_match, wrong: 0.25, weight: 4}, b: {type: vader}}\n")
    judge = scorer_rewards({"model": reward_model.path, "number": "number", "yaml": str(tmp_path / "sum.yaml")}[name])
    match = {"match": ExactMatchReward(type="exact_match", wrong=0.25)}
    answer, expected = scored(rollout, policy_model, match, judge=judge), scored(rollout, policy_model, judge)
    assert answer.gold.tolist() == expected.scores.tolist() and expected.gold is None
    assert answer.scores.tolist() == [0.25] * 3 and answer.components.keys() == {"match"}


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")  # of the call that is refused
def test_several_rollouts_are_scored_side_by_side(rollout, policy_model):
    prompts = Prompts(offsets=offsets_of(np.ones(3)), tokens=np.zeros(3, dtype=np.int32), rows=np.arange(3),
                      texts=["p"] * 3, metadata=[{"answer": "w2"}] * 3)
    match = {"match": ExactMatchReward(type="exact_match", wrong=0.25)}

    async def ask():
        scorer = RewardScorer(match, policy_model, 1000)
        assert await scorer.start() == {}, "without a model nothing is compared"
        two = await scorer.score_each([rollout, rollout.select([1])], [prompts, prompts.select([1])])
        with pytest.raises(ValueError, match="zip"):
            await scorer.score_each([rollout, rollout], [prompts])
        await scorer.stop()
        return two

    assert [answer.scores.tolist() for answer in asyncio.run(ask())] == [[0.25] * 3, [0.25]]
