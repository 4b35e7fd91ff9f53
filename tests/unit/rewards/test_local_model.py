"""What a reward model of another tokenizer is given to read, and what it says then."""

import asyncio
import json
import re
import shutil

import numpy as np
import pytest
import torch
import transformers

from rlhf_ray.config.data import PreferencesConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.rewards import ModelReward
from rlhf_ray.data.preferences import load_preferences
from rlhf_ray.data.tokenizer import train_tokenizer
from rlhf_ray.errors import RewardError
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.rewards import request_encoding
from rlhf_ray.rewards.local_model import ModelSource
from rlhf_ray.rewards.request_encoding import encode_request
from tests.models import make_tiny_llama, make_tiny_reward_model

TEMPLATE = ("{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
            "{% if add_generation_prompt %}[assistant] {% endif %}")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return ModelConfig(path=str(make_tiny_llama(tmp_path_factory.mktemp("m") / "policy", vocab=40, hidden=32, heads=1)))


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A reward model with the policy's tokenizer."""
    return make_tiny_reward_model(tmp_path_factory.mktemp("m") / "own", vocab=40)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A reward model with a tokenizer of its own, of bytes and a few merges, with a chat template."""
    directory = make_tiny_reward_model(tmp_path_factory.mktemp("m") / "other", vocab=300, positions=64)
    tokenizer = train_tokenizer(["the user asks", "the assistant answers"], 300, directory)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def encoder(tmp_path_factory, other):
    directory = tmp_path_factory.mktemp("m") / "encoder"
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(transformers.BertConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, num_labels=1, initializer_range=0.3)).save_pretrained(directory)
    load_tokenizer(ModelConfig(path=str(other))).save_pretrained(directory)
    return directory


def scores(directory, policy, requests, budget=64, **options):
    async def live():
        source = ModelSource("quality", ModelReward(type="model", path=str(directory), **options), policy, budget)
        await source.start()
        return (await source.score(requests)).scores

    return asyncio.run(live())


def plainly(directory, ids):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory).eval()
    with torch.no_grad():
        return [model(torch.tensor(row)[None]).logits.item() for row in ids]


def test_with_the_policy_s_vocabulary_its_ids_are_read_as_they_are(policy, own, ask):
    requests = [ask("words that", 0, tokens=np.array([5, 6, 7], dtype=np.int32)),
                ask("are not read", 1, tokens=np.array([8, 9], dtype=np.int32))]
    assert scores(own, policy, requests) == pytest.approx(plainly(own, [[5, 6, 7], [8, 9]]), abs=1e-5)


def test_ids_that_the_model_has_no_embeddings_for_are_read_as_the_text_that_they_are(policy, own, ask):
    """A policy with more embeddings than its tokenizer has tokens can draw them; they say nothing."""
    strange = ask("w7", prompt="w5 w6 ", tokens=np.array([5, 6, 41, 7, 1], dtype=np.int32))
    assert scores(own, policy, [strange]) == pytest.approx(plainly(own, [[5, 6, 7, 1]]), abs=1e-5)


def test_text_goes_through_the_model_s_own_tokenizer_and_ends_where_the_response_did(policy, other, ask):
    tokenizer = load_tokenizer(ModelConfig(path=str(other)))
    requests = [ask(" yes", 0, prompt="is it?"), ask(" ye", 1, prompt="is it?", finish_reason="length")]
    ids = [[*tokenizer("is it? yes").input_ids, tokenizer.eos_token_id], tokenizer("is it? ye").input_ids]
    assert [encode_request(r, tokenizer, pair=False).ids.tolist() for r in requests] == ids
    assert scores(other, policy, requests) == pytest.approx(plainly(other, ids), abs=1e-5)


def test_no_token_spans_prompt_and_response(monkeypatch, other, ask):
    """As in training: prompts that end with a space have other tokens together with their responses."""
    tokenizer, seen = load_tokenizer(ModelConfig(path=str(other))), []
    monkeypatch.setattr(request_encoding, "encode_pieces", lambda _, rows: seen.extend(rows) or [([1], [True])])
    encode_request(ask("yes", prompt="is it? "), tokenizer, pair=False)
    assert [(piece.text, piece.leading) for piece in seen[0]] == [("is it? ", True), ("yes", False)]


def test_a_tokenizer_without_an_end_adds_none(other, ask):
    tokenizer = load_tokenizer(ModelConfig(path=str(other)))
    tokenizer.eos_token = None
    request = ask(" yes", prompt="is it?")
    assert encode_request(request, tokenizer, pair=False).ids.tolist() == tokenizer("is it? yes").input_ids


def test_messages_go_through_the_model_s_own_chat_template(policy, other, ask):
    tokenizer = load_tokenizer(ModelConfig(path=str(other)))
    request = ask("so be it", prompt="<policy's own template>", messages=[{"role": "user", "content": "do"}])
    ids = encode_request(request, tokenizer, pair=False).ids
    assert tokenizer.decode(ids) == "[user] do<|eos|>[assistant] so be it<|eos|>"
    assert scores(other, policy, [request]) == pytest.approx(plainly(other, [ids.tolist()]), abs=1e-5)


LINES = ("{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}\n{% endfor %}"
         "{% if add_generation_prompt %}[assistant] {% endif %}")
"""As ChatML has it: a line break after the token that ends a turn."""


@pytest.mark.parametrize("finish_reason, end", [("stop", "<|eos|>"), ("length", "")])
def test_a_conversation_is_scored_where_training_ends_it(other, ask, tmp_path, finish_reason, end):
    """At the token that ends the turn, not at what the template writes after it; a cut response has no end."""
    tokenizer = load_tokenizer(ModelConfig(path=str(other)))
    tokenizer.chat_template = LINES
    messages = [{"role": "user", "content": "do"}]
    ids = encode_request(ask("so", messages=messages, finish_reason=finish_reason), tokenizer, pair=False).ids
    assert tokenizer.decode(ids) == "[user] do<|eos|>\n[assistant] so" + end
    sides = {"chosen": "so", "rejected": "no"}
    if finish_reason == "stop":
        sides = {name: [{"role": "assistant", "content": text}] for name, text in sides.items()}
    row = {"prompt": messages, **sides, "chosen_finished": finish_reason == "stop"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row))
    trained, _, _ = load_preferences(PreferencesConfig(path=str(tmp_path / "pairs.jsonl")), tokenizer)
    assert trained.chosen.row(0, "tokens").tolist() == ids.tolist()


def test_messages_without_a_template_are_read_as_the_policy_saw_them(own, ask):
    request = ask("w5", prompt="w2 w3 ", messages=[{"role": "user", "content": "w2"}], finish_reason="length")
    assert encode_request(request, load_tokenizer(ModelConfig(path=str(own))), pair=False).ids.tolist() == [2, 3, 5]


def test_a_template_that_refuses_is_told_with_the_sample(other, ask, tmp_path):
    tokenizer = load_tokenizer(ModelConfig(path=str(other)))
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    request = ask("no", 4, messages=[{"role": "assistant", "content": "do"}])
    said = r"epoch 0 row 4 sample 0, for .*: the tokenizer's chat template refuses the messages, .*: roles must"
    with pytest.raises(RewardError, match=said):
        encode_request(request, tokenizer, pair=False)


@pytest.fixture(scope="module")
def sentiment(tmp_path_factory):
    """An encoder with three labels, and a tokenizer that puts tokens of its own around a text and has no end."""
    directory = tmp_path_factory.mktemp("m") / "sentiment"
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(transformers.BertConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, initializer_range=0.3, id2label={0: "NEGATIVE", 1: "NEUTRAL", 2: "POSITIVE"},
        label2id={"NEGATIVE": 0, "NEUTRAL": 1, "POSITIVE": 2})).save_pretrained(directory)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "food", "was", "good", "bad", "not"]
    vocabulary = {word: i for i, word in enumerate(words)}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(directory)
    return directory


FOOD = (" good", " bad", " not good")


@pytest.mark.parametrize(("label", "number"), [("POSITIVE", 2), (0, 0)])
def test_a_label_of_a_sentiment_classifier_is_a_reward(label, number, policy, sentiment, ask):
    """It reads prompt and response as the one text that they are, with the tokens around it."""
    requests = [ask(text, i, prompt="the food was") for i, text in enumerate(FOOD)]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(sentiment).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(sentiment)
    assert tokenizer.eos_token is None and tokenizer("the food").input_ids == [2, 5, 6, 3]
    with torch.no_grad():
        logits = torch.cat([model(**tokenizer(f"the food was{text}", return_tensors="pt")).logits for text in FOOD])
    assert logits.std(0).min() > 0.01
    assert scores(sentiment, policy, requests, label=label) == pytest.approx(logits[:, number].numpy(), abs=1e-5)
    probabilities = scores(sentiment, policy, requests, label=label, value="probability")
    assert probabilities == pytest.approx(logits.softmax(-1)[:, number].numpy(), abs=1e-5)


@pytest.mark.parametrize("problem", [None, "multi_label_classification"])
def test_a_label_of_a_decoder_is_a_reward_on_packed_rows_too(problem, policy, own, ask, tmp_path):
    directory = shutil.copytree(own, tmp_path / "labels")
    torch.manual_seed(2)
    transformers.LlamaForSequenceClassification.from_pretrained(
        directory, num_labels=3, ignore_mismatched_sizes=True, problem_type=problem).save_pretrained(directory)
    ids = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    requests = [ask("words", i, tokens=np.array(row, dtype=np.int32)) for i, row in enumerate(ids)]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory).eval()
    with torch.no_grad():
        logits = torch.cat([model(torch.tensor(row)[None]).logits for row in ids])
    assert scores(directory, policy, requests, label=1) == pytest.approx(logits[:, 1].numpy(), abs=1e-5)
    expected = logits.sigmoid() if problem else logits.softmax(-1)
    probabilities = scores(directory, policy, requests, label=1, value="probability")
    assert probabilities == pytest.approx(expected[:, 1].numpy(), abs=1e-5)


def test_the_probability_of_a_single_label_is_logistic(policy, own, ask):
    requests = [ask("words", 0, tokens=np.array([5, 6, 7], dtype=np.int32))]
    logit = torch.tensor(plainly(own, [[5, 6, 7]]))
    assert scores(own, policy, requests, value="probability") == pytest.approx(logit.sigmoid().numpy(), abs=1e-5)


def test_an_encoder_reads_a_pair(policy, encoder, ask):
    tokenizer = load_tokenizer(ModelConfig(path=str(encoder)))
    requests = [ask("yes, it is", 0, prompt="is it?"), ask("no", 1, prompt="is it not? I ask")]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(encoder).eval()
    with torch.no_grad():
        expected = [model(**tokenizer(r.prompt, r.response, return_tensors="pt")).logits.item() for r in requests]
    assert scores(encoder, policy, requests) == pytest.approx(expected, abs=1e-5)
    assert abs(expected[0] - expected[1]) > 1e-3


def test_a_text_over_the_model_s_context_is_an_error_that_names_the_sample(policy, other, ask):
    requests = [ask("short", 0, prompt=""), ask("x" * 80, 1, prompt="")]
    said = r"1 samples \(epoch 0 row 1 sample 0\) have up to 81 tokens .* \(rewards\.quality\), over its context of 64"
    with pytest.raises(RewardError, match=said):
        scores(other, policy, requests)


def test_rows_over_the_micro_batch_budget_are_read_alone(policy, other, ask):
    requests = [ask("x" * n, n, prompt="") for n in (40, 3, 20)]
    assert scores(other, policy, requests, budget=8) == pytest.approx(scores(other, policy, requests, 1000), abs=1e-5)


def test_the_vocabulary_decides_not_the_directory(policy, own, tmp_path, ask):
    copy = shutil.copytree(own, tmp_path / "copy")
    text = (copy / "tokenizer.json").read_text()
    (copy / "tokenizer.json").write_text(re.sub(r'"w38": 38', '"x38": 38', text))
    request = ask("w7", 0, prompt="w5 w6 ", tokens=np.array([8, 9], dtype=np.int32), finish_reason="length")
    assert scores(copy, policy, [request]) == pytest.approx(plainly(own, [[5, 6, 7]]), abs=1e-5)
