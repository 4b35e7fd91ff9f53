"""The texts of responses that rewards read: what continues the prompt, what the prompt begins, special tokens."""

import asyncio
import json

import numpy as np
import pytest

from rlhf_ray.config.data import PreferencesConfig
from rlhf_ray.config.model import NewModelConfig
from rlhf_ray.config.rewards import FunctionReward, RegexReward
from rlhf_ray.data.preferences import load_preferences
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.records import Prompts, Rollout, SampleKey, offsets_of
from rlhf_ray.rewards.function_source import FunctionSource
from rlhf_ray.rewards.http.wire import request_body
from rlhf_ray.rewards.protocol import requests_of
from rlhf_ray.rewards.regex_and_json_schema import regex_source
from rlhf_ray.rewards.request_encoding import encode_request
from tests.layouts import make_layout

USER = {"role": "user", "content": "Was it good?"}


@pytest.fixture(scope="module")
def layout(tmp_path_factory):
    root = tmp_path_factory.mktemp("layouts")
    return lambda name: load_tokenizer(NewModelConfig(architecture={}, tokenizer=str(make_layout(root / name, name))))


def sampled(tokenizer, response, prompt=None, finish="stop", options=None):
    """The request of a response, given as text with special tokens, to a chat prompt, or to a text."""
    text = prompt or tokenizer.apply_chat_template([USER], add_generation_prompt=True, tokenize=False,
                                                   **(options or {}))
    head = tokenizer(text, add_special_tokens=prompt is not None)["input_ids"]
    whole = np.array(tokenizer(text + response, add_special_tokens=prompt is not None)["input_ids"], np.int32)
    assert whole[: len(head)].tolist() == head, "choose a response that no token joins with the prompt"
    mask = np.arange(len(whole)) >= len(head)
    rollout = Rollout(
        offsets=offsets_of([len(whole)]), tokens=whole, response_mask=mask, logprobs=np.zeros(len(whole), np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32), keys=[SampleKey(0, 0, 0)], seeds=np.zeros(1, np.int64),
        finish_reasons=[finish])
    prompts = Prompts(offsets=offsets_of([len(head)]), tokens=np.array(head, np.int32), texts=[text],
                      metadata=[{"chat_template_kwargs": options} if options else {}],
                      rows=np.array([0]), messages=None if prompt else [[USER]])
    return requests_of(rollout, prompts, tokenizer)[0]


def scored(source, request):
    async def live():
        await source.start()
        try:
            return float((await source.score([request])).scores[0])
        finally:
            await source.stop()

    return asyncio.run(live())


def by_pattern(request, pattern, **options):
    return scored(regex_source("shape", RegexReward(type="regex", pattern=pattern, **options)), request)


def test_a_response_keeps_the_blank_that_follows_the_prompt(layout):
    tokenizer = layout("blank_first")
    assert sampled(tokenizer, " was good</s>", prompt="The film").response == " was good"
    assert sampled(tokenizer, " was good", prompt="The film", finish="length").response == " was good"


def test_special_tokens_reach_a_pattern_and_a_function_on_request(layout, tmp_path, monkeypatch):
    request = sampled(layout("special_think"), "<think>It was.</think>good<|im_end|>")
    assert request.response == "It was.good" and request.text(True) == "<think>It was.</think>good"
    pattern = r"^<think>.*</think>good$"
    assert by_pattern(request, pattern) == 0.0
    assert by_pattern(request, pattern, keep_special_tokens=True, match="full") == 1.0
    (tmp_path / "mine.py").write_text("def tagged(responses): return [float('<think>' in r) for r in responses]")
    monkeypatch.chdir(tmp_path)
    for kept in (False, True):
        config = FunctionReward(type="function", function="mine.py:tagged", keep_special_tokens=kept)
        assert scored(FunctionSource("tagged", config), request) == float(kept)


def test_a_cut_response_keeps_its_last_special_token(layout):
    assert sampled(layout("special_think"), "so</think>", finish="length").text(True) == "so</think>"
    assert sampled(layout("special_think"), "so", finish="length").marked_response is None


@pytest.mark.parametrize("prompt", [None, "Solve it. Assistant: <think>\n"])
def test_a_pattern_sees_what_the_prompt_begins(prompt, layout, tmp_path, monkeypatch):
    request = sampled(layout("opened"), "It was.</think>good<|im_end|>", prompt=prompt)
    assert (request.prefill, request.response) == ("<think>\n", "It was.</think>good")
    assert by_pattern(request, "^<think>.*</think>") == 1.0
    (tmp_path / "mine.py").write_text("def begun(prefills): return [float(p == '<think>\\n') for p in prefills]")
    monkeypatch.chdir(tmp_path)
    assert scored(FunctionSource("begun", FunctionReward(type="function", function="mine.py:begun")), request) == 1.0
    [sent] = json.loads(request_body([request], "text", []))["samples"]
    assert sent["prefill"] == "<think>\n" and sent["response"] == "It was.</think>good"


def test_what_an_option_of_the_row_begins_is_seen(layout):
    tokenizer = layout("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "assistant\n{% endif %}", "assistant\n{% if thinking %}<think>\n{% endif %}{% endif %}")
    request = sampled(tokenizer, "It was.</think>good<|im_end|>", options={"thinking": True})
    assert request.prefill == "<think>\n" and by_pattern(request, "^<think>.*</think>") == 1.0
    assert sampled(tokenizer, "good<|im_end|>").prefill == ""


def test_a_prompt_that_begins_nothing_sends_nothing_of_it(layout):
    request = sampled(layout("chatml"), "good<|im_end|>")
    assert request.prefill == "" and "prefill" not in json.loads(request_body([request], "text", []))["samples"][0]


@pytest.mark.parametrize(("policy", "scorer", "response", "read"), [
    ("opened", "opened", "It was.</think>good<|im_end|>", "assistant\n<think>\nIt was.</think>good<|im_end|>"),
    ("opened", "chatml", "It was.</think>good<|im_end|>", "assistant\n<think>\nIt was.</think>good<|im_end|>"),
    ("chatml", "two_ends", "good<|im_end|>", "<|assistant|>\ngood<|end|>"),
    ("chatml", "channels", "good<|im_end|>", "assistant<|channel|>final<|message|>good<|im_end|>"),
    ("chatml", "wrapped", "good<|im_end|>", "assistant\n<think>\n\n</think>\n\ngood<|im_end|>"),
])
def test_a_reward_model_with_its_own_template_reads_the_whole_answer(policy, scorer, response, read, layout):
    request, tokenizer = sampled(layout(policy), response), layout(scorer)
    assert tokenizer.decode(encode_request(request, tokenizer, pair=False).ids).endswith(read)


def test_a_pair_of_samples_is_trained_as_the_tokens_that_were_sampled(layout, tmp_path):
    """With the row that `preferences` writes, special tokens included."""
    tokenizer = layout("channels")
    requests = [sampled(tokenizer, f"<|channel|>final<|message|>{text}<|im_end|>") for text in ("good", "bad")]
    row = {"prompt": [USER], **{side: request.text(keep_special_tokens=True)
                                for side, request in zip(("chosen", "rejected"), requests, strict=True)},
           "chosen_finished": True, "rejected_finished": True}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row))
    pairs, *_ = load_preferences(PreferencesConfig(path=str(tmp_path / "pairs.jsonl"), held_out=0), tokenizer)
    for side, request in zip((pairs.chosen, pairs.rejected), requests, strict=True):
        assert side.tokens.tolist() == request.tokens.tolist()
