"""A process reward model as a source: its probabilities, and where they go."""

import asyncio
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhf_ray.config.data import StepsConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.rewards import ProcessReward
from rlhf_ray.data.stepwise_format import save_steps
from rlhf_ray.data.tokenizer import train_tokenizer
from rlhf_ray.errors import ModelError, RewardError
from rlhf_ray.records import SampleKey
from rlhf_ray.rewards.process_reward_model import ProcessModelSource, aggregate
from rlhf_ray.rewards.protocol import RewardRequest
from tests.models import make_tiny_llama

STEPS = StepsConfig(placeholder="w9", good="w2", bad="w3")
RESPONSES = ["w10 w11\nw12\n\nw13 w14 w15", "w20", "w21\nw22 w23", " \n"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A process reward model of whole words."""
    directory = make_tiny_llama(tmp_path_factory.mktemp("models") / "steps", vocab=40, hidden=32, heads=1, positions=32)
    save_steps(STEPS, directory)
    return directory


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """The directory of a tokenizer of a policy that writes letters and pieces of words."""
    directory = tmp_path_factory.mktemp("policy")
    train_tokenizer(["w10 w11 w12\n"] * 20, 262, directory)
    return ModelConfig(path=str(directory))


@pytest.fixture(scope="module")
def requests(policy):
    from rlhf_ray.models.loading import load_tokenizer

    tokenizer = load_tokenizer(policy)
    prompt, made = tokenizer("w7 w8")["input_ids"], []
    for row, response in enumerate(RESPONSES):
        ids = [*tokenizer(response)["input_ids"], tokenizer.eos_token_id]
        mask = np.repeat([False, True], [len(prompt), len(ids)])
        made.append(RewardRequest(SampleKey(0, row, 0), "w7 w8", response, np.array([*prompt, *ids], np.int32), mask,
                                  "stop", {}))
    return made


def source(model, policy, budget=64, **fields):
    made = ProcessModelSource("steps", ProcessReward(type="process", path=str(model), **fields), policy, budget)
    asyncio.run(made.start())
    return made


def by_hand(directory, words, places):
    """Probability of w2 against w3 after each placeholder of "w7 w8 ..."."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(directory).eval()
    with torch.no_grad():
        logits = plain(torch.tensor([words])).logits[0]
    return [float(torch.sigmoid(logits[i, 2] - logits[i, 3])) for i in places]


@pytest.fixture(scope="module")
def expected(model):
    """Probabilities of the steps of RESPONSES; the one without a step has 0."""
    first = by_hand(model, [7, 8, 10, 11, 9, 12, 9, 13, 14, 15, 9], [4, 6, 10])
    return [first, by_hand(model, [7, 8, 20, 9], [3]), by_hand(model, [7, 8, 21, 9, 22, 23, 9], [3, 6]), [0.0]]


@pytest.mark.parametrize("budget", [8, 1000])
def test_steps_are_judged_as_transformers_would_and_credited_where_they_end(model, policy, requests, expected, budget):
    answer = asyncio.run(source(model, policy, budget).score(requests))
    assert answer.failures == 1, "one response has no step"
    rows = np.split(answer.token_rewards, np.cumsum([len(r.tokens) for r in requests])[:-1])
    for row, request, values in zip(rows, requests, expected, strict=True):
        at = np.flatnonzero(row)
        assert row[at] == pytest.approx([v for v in values if v], abs=1e-5)
        if len(at):
            assert at[-1] == len(request.tokens) - 1
    assert answer.scores == pytest.approx([sum(values) for values in expected], abs=1e-5)
    from rlhf_ray.models.loading import load_tokenizer

    tokens, ends = requests[0].tokens, np.flatnonzero(rows[0])
    begin = int(np.argmax(requests[0].response_mask))
    texts = [load_tokenizer(policy).decode(tokens[begin : end + 1]) for end in ends[:2]]
    assert [text.rstrip("\n") for text in texts] == ["w10 w11", "w10 w11\nw12"]


@pytest.mark.parametrize(("kind", "number"), [("min", min), ("prod", math.prod), ("mean", lambda p: sum(p) / len(p)),
                                              ("last", lambda p: p[-1])])
def test_an_outcome_is_one_number_on_the_whole_response(model, policy, requests, expected, kind, number):
    answer = asyncio.run(source(model, policy, placement="outcome", aggregate=kind).score(requests))
    assert answer.token_rewards is None
    assert answer.scores == pytest.approx([number(values) for values in expected], abs=1e-5)


def test_further_labels_count_by_their_values(model, policy, requests, tmp_path):
    """The expected value among w2, w3, w4 and w5, worth 1, 0, 1 and 0.25."""
    from transformers import AutoModelForCausalLM

    other = shutil.copytree(model, tmp_path / "other")
    save_steps(STEPS.model_copy(update={"others": {"w4": 1.0, "w5": 0.25}}), other)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model).eval()(torch.tensor([[7, 8, 20, 9]])).logits[0, 3]
    shares = np.exp(logits[2:6].double().numpy())
    expected = float(shares @ [1, 0, 1, 0.25] / shares.sum())
    assert asyncio.run(source(other, policy).score([requests[1]])).scores == pytest.approx([expected], abs=1e-5)


def test_centred_values_cost_where_a_step_is_bad(model, policy, requests, expected):
    answer = asyncio.run(source(model, policy, value="centred").score(requests))
    assert answer.scores == pytest.approx([sum(2 * v - 1 for v in values) for values in expected], abs=1e-5)
    outcome = asyncio.run(source(model, policy, value="centred", placement="outcome").score(requests))
    assert outcome.scores == pytest.approx([2 * min(values) - 1 for values in expected], abs=1e-5)
    assert outcome.scores[3] == -1, "nothing is what was asked for"


def test_the_answer_does_not_hang_on_the_others_in_the_batch(model, policy, requests):
    made = source(model, policy)
    whole = asyncio.run(made.score(requests))
    alone = [asyncio.run(made.score([request])) for request in requests]
    assert np.concatenate([a.token_rewards for a in alone]) == pytest.approx(whole.token_rewards, abs=1e-6)


def test_messages_go_through_the_model_s_own_template(model, policy, requests, tmp_path):
    from transformers import AutoTokenizer

    other = shutil.copytree(model, tmp_path / "chatty")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.chat_template = ("{% for m in messages %}w5 {{ m.content }} {% endfor %}"
                               "{% if add_generation_prompt %}w6{% endif %}")
    tokenizer.save_pretrained(other)
    asked = replace(requests[1], messages=[{"role": "user", "content": "w30 w31"}])
    answer = asyncio.run(source(other, policy).score([asked]))
    assert answer.scores == pytest.approx(by_hand(model, [5, 30, 31, 6, 20, 9], [5]), abs=1e-5)
    plain = asyncio.run(source(model, policy).score([asked]))
    assert plain.scores == pytest.approx(by_hand(model, [7, 8, 20, 9], [3]), abs=1e-5), "without one, the text"


def test_a_model_without_its_step_format_is_refused(model, policy, tmp_path):
    with pytest.raises(ModelError, match=r"rewards\.steps\.path='.*' has no process_reward\.json"):
        source(make_tiny_llama(tmp_path / "plain", vocab=40, hidden=32, heads=1), policy)
    save_steps(StepsConfig(placeholder="w99"), other := make_tiny_llama(tmp_path / "other", 40, hidden=32, heads=1))
    with pytest.raises(ModelError, match=r"steps\.placeholder='w99' is not a single token"):
        source(other, policy)


def test_a_row_over_the_context_is_named(model, policy, requests):
    long = replace(requests[1], prompt="w7 " * 31, key=SampleKey(2, 5, 1))
    with pytest.raises(RewardError, match=r"epoch 2 row 5 sample 1.* up to 33 tokens.* over its context of 32"):
        asyncio.run(source(model, policy).score([requests[0], long]))


def test_a_damaged_model_s_answer_is_an_error(model, policy, requests):
    made = source(model, policy)
    with torch.no_grad():
        made._model.model.lm_head.weight[2] = math.nan
    with pytest.raises(RewardError, match=r"rewards\.steps.*3 of 4 samples \(epoch 0 row 0.*no finite probability"):
        asyncio.run(made.score(requests))


def test_aggregates():
    p = np.array([0.5, 0.25, 1.0])
    assert [aggregate(p, kind) for kind in ("min", "prod", "mean", "last")] == [0.25, 0.125, 1.75 / 3, 1.0]
