"""What a person may name as a scorer, and what is refused before a model is loaded."""

import asyncio

import numpy as np
import pytest

from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.config.rewards import (
    ExactMatchReward,
    FunctionReward,
    HTTPReward,
    ModelReward,
    NumberReward,
    VaderReward,
)
from rlhf_ray.errors import ConfigError, DataError, ModelError
from rlhf_ray.records import SampleKey
from rlhf_ray.rewards.protocol import RewardRequest
from rlhf_ray.roles.prompt_input import PromptInput
from rlhf_ray.stages.compare import CompareOptions, run
from rlhf_ray.stages.resolve_model import model_at
from rlhf_ray.stages.scorers import check_answers, check_scorer, rewards_of, scorer_of
from tests.models import make_tiny_llama, make_tiny_reward_model


def request(response, **metadata):
    tokens, mask = np.array([2, 3], np.int32), np.array([False, True])
    return RewardRequest(SampleKey(0, 0, 0), "w2", response, tokens, mask, "stop", metadata)


def scores(name, model, *requests):
    async def ask():
        scorer = scorer_of(name, model)
        await scorer.start()
        try:
            return (await scorer.score(requests)).scores.tolist()
        finally:
            await scorer.stop()

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_at(str(make_tiny_llama(tmp_path_factory.mktemp("m") / "model", 16, hidden=32, heads=1)))[0]


def test_each_name_is_the_source_it_says(tmp_path):
    reward = str(make_tiny_reward_model(tmp_path / "reward", 16))
    (tmp_path / "r.yaml").write_text("rewards: {sum: {type: number, weight: 2}}\nrun: {steps: 3}\n")
    found = {name: rewards_of(name) for name in (
        "exact_match", "number", "vader", "http://localhost:1", "tests/judge.py:score", reward,
        str(tmp_path / "r.yaml"))}
    kinds = [type(next(iter(rewards.values()))) for rewards in found.values()]
    assert kinds == [ExactMatchReward, NumberReward, VaderReward, HTTPReward, FunctionReward, ModelReward, NumberReward]
    assert found[str(tmp_path / "r.yaml")]["sum"].weight == 2


def test_scores_come_from_what_was_named(model, tmp_path):
    (tmp_path / "r.yaml").write_text("a: {type: exact_match, weight: 2}\nb: {type: number, right: 5}\n")
    right, wrong = request("w7 7", answer="w7 7"), request("w7 8", answer="w7 7")
    assert scores("exact_match", model, right, wrong) == [1.0, 0.0]
    assert scores(str(tmp_path / "r.yaml"), model, right, wrong) == [7.0, 0.0]
    good, bad = scores("vader", model, request("a wonderful day"), request("a terrible day"))
    assert good > 0 > bad


@pytest.mark.parametrize(("name", "error", "words"), [
    ("none.yaml", ConfigError, "none.yaml does not exist; name one of: vader"),
    ("./nowhere", ModelError, "--scorer='./nowhere': no such directory"),
])
def test_a_scorer_that_is_not_there(name, error, words):
    with pytest.raises(error, match=words):
        rewards_of(name)


def test_a_rewards_file_that_is_none_says_where(tmp_path):
    (tmp_path / "r.yaml").write_text("a: {type: exact_mach}\n")
    with pytest.raises(ConfigError, match=r"r\.yaml is not a valid rewards section: a"):
        rewards_of(str(tmp_path / "r.yaml"))


@pytest.mark.parametrize(("scorer", "words"), [
    ("{here}/rewards.py:bref", "the reward function '.*:bref' cannot be used: .*no attribute 'bref'"),
    ("{here}/missing.py:brief", "the reward function '.*' cannot be used"),
    ("http://127.0.0.1:9", "is not ready"),
    ("{here}/model", "^--scorer='.*/model' is not a reward model"),
])
def test_a_scorer_that_cannot_judge_is_refused_by_the_name_of_its_option(scorer, words, model, tmp_path):
    (tmp_path / "rewards.py").write_text("def brief(responses):\n    return [0.0] * len(responses)\n")
    make_tiny_llama(tmp_path / "model", 16, hidden=32, heads=1)
    check_scorer(f"{tmp_path}/rewards.py:brief", model, "--scorer")
    with pytest.raises((ConfigError, ModelError), match=words) as refused:
        check_scorer(scorer.format(here=tmp_path), model, "--scorer")
    assert "--scorer" in str(refused.value) and "rewards." not in str(refused.value).replace("rewards.py", "")
    assert refused.value.exit_code == 2


def test_compare_refuses_its_scorer_before_a_model_answers(model, tmp_path, monkeypatch):
    (tmp_path / "p.jsonl").write_text('{"prompt": "w2"}\n')
    (tmp_path / "rewards.py").write_text("")
    monkeypatch.setattr("rlhf_ray.stages.compare.LocalGenerator", None)  # no model gets as far as being loaded
    with pytest.raises(ConfigError, match="--scorer"):
        run(CompareOptions(model.path, model.path, str(tmp_path / "p.jsonl"), f"{tmp_path}/rewards.py:brief",
                           tmp_path / "page.html", SamplingConfig()))


def test_answers_are_looked_for_before_anything_is_asked(model, tmp_path):
    questions = [PromptInput("w2", "p, line 1", {"answer": 1}), PromptInput("w3", "p, line 2", {"level": 1})]
    check_answers("exact_match", questions[:1], model, "--scorer")
    check_answers("vader", questions, model, "--scorer")
    missing = "--scorer number.answer='answer': p, line 2 has no such column; other columns: level$"
    with pytest.raises(DataError, match=missing):
        check_answers("number", questions, model, "--scorer")
    (tmp_path / "format.yaml").write_text("form: {type: regex, pattern: '^<think>'}\n")
    check_answers(str(tmp_path / "format.yaml"), questions, model, "--scorer")


@pytest.mark.parametrize(("scorer", "answer"), [("number", None), ("number", "none"), ("exact_match", " ")])
def test_an_answer_that_nothing_equals_is_refused_before_anything_is_asked(model, scorer, answer):
    questions = [PromptInput("w2", "p, line 1", {"answer": answer})]
    with pytest.raises(DataError, match="p, line 1 is .*cannot compare with a response"):
        check_answers(scorer, questions, model, "--reward")


def test_a_runs_directory_stands_for_its_model(tmp_path):
    run = tmp_path / "run"
    made = make_tiny_llama(run / "model", 16, hidden=32, heads=1)
    model, said = model_at(str(run))
    assert model.path == str(made) and said == f"{run} is a run; using its model, {made}"
    (run / "best").mkdir()
    assert f"its best step is in {run / 'best'}" in model_at(str(run))[1]
    assert model_at(str(made)) == (model, None)
    with pytest.raises(ModelError, match=rf"^MODEL='{tmp_path / 'nothing'}': no such directory"):
        model_at(str(tmp_path / "nothing"))
