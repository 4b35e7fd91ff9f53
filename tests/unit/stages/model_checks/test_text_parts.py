"""Tokenizers, stop tokens and chat templates of models as people have them."""

import json
import shutil

import pytest

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.tokenizer import SMALLEST_VOCABULARY, train_tokenizer
from rlhf_ray.errors import ModelError
from rlhf_ray.stages.model_checks.text_parts import (
    check_chat_template,
    check_stop_tokens,
    check_tokenizer,
    check_turns,
)
from tests import chat_templates
from tests.models import make_tiny_llama
from tests.real_models import KINDS, make_real_model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {kind: make_real_model(tmp_path_factory.mktemp("real") / kind, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A model without a chat template."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "plain", vocab=300, hidden=32, heads=1)


def of(path):
    return ModelConfig(path=str(path))


def test_a_tokenizer_of_all_bytes_changes_no_text(plain, tmp_path):
    model = shutil.copytree(plain, tmp_path / "m")
    train_tokenizer(["the food was good"], SMALLEST_VOCABULARY, model)
    (outcome,) = check_tokenizer(of(model))
    assert outcome.verdict == "works" and outcome.numbers["changed_texts"] == 0
    assert "258 tokens, 300 embeddings" in outcome.detail


def test_a_tokenizer_that_does_not_know_a_text_is_shown_with_one(models):
    (outcome,) = check_tokenizer(of(models["qwen"]))
    assert outcome.verdict == "warning" and outcome.numbers["changed_texts"] == 6
    assert "'The food was good, and it wasn't" in outcome.detail.replace('"', "'")


def test_ids_without_an_embedding_are_an_error(plain, tmp_path):
    model = shutil.copytree(plain, tmp_path / "m")
    train_tokenizer([chr(i) * 9 for i in range(97, 123)] * 9, 400, model)
    with pytest.raises(ModelError, match="has only 300 embeddings"):
        check_tokenizer(of(model))


@pytest.mark.parametrize(("kind", "names"), [("qwen", "<|im_end|>"), ("llama", "<|eom|>"), ("gemma", "</turn>")])
def test_all_tokens_that_end_a_response_are_listed(kind, names, models):
    (outcome,) = check_stop_tokens(of(models[kind]))
    assert outcome.verdict == "works" and names in outcome.detail
    assert outcome.numbers["stop_tokens"] == len(KINDS[kind]["ends"])


def test_a_template_whose_turns_end_with_a_token_that_ends_no_response(models, tmp_path):
    """As with Qwen's base models, whose tokenizer ends texts otherwise than the template ends turns."""
    model = shutil.copytree(models["qwen"], tmp_path / "m")
    for file, ends in (("config.json", 2), ("generation_config.json", [2])):
        values = json.loads((model / file).read_text())
        (model / file).write_text(json.dumps({**values, "eos_token_id": ends}))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<|endoftext|>"}))
    (outcome,) = check_stop_tokens(of(model))
    assert outcome.verdict == "warning" and "the chat template ends an answer with '<|im_end|>' (1)" in outcome.detail
    assert "name only '<|endoftext|>'" in outcome.detail and outcome.numbers["stop_tokens"] == 2


@pytest.mark.parametrize(("kind", "verdict", "system", "begins"), [
    ("qwen", "works", "taken", "'<|im_start|>assistant\\n'"),
    ("llama", "works", "taken", "'<|header|>assistant<|/header|>\\n\\n'"),
    ("gemma", "warning", "refused", "'<turn>model\\n'"),
    ("mistral", "works", "taken", "nothing marks"),
])
def test_templates(kind, verdict, system, begins, models):
    (outcome,) = check_chat_template(of(models[kind]))
    assert outcome.verdict == verdict
    assert f"system message {system}" in outcome.detail and begins in outcome.detail
    assert ("leave prompts.system and data.system empty" in outcome.advice) is (system != "taken")


def with_template(models, tmp_path, template):
    model = shutil.copytree(models["qwen"], tmp_path / "m")
    (model / "chat_template.jinja").write_text(template)
    return of(model)


def test_a_template_that_leaves_out_the_system_message(models, tmp_path):
    model = with_template(models, tmp_path, "{% for m in messages if m.role != 'system' %}{{ m.content }}</s>"
                          "{% endfor %}{% if add_generation_prompt %}>{% endif %}")
    (outcome,) = check_chat_template(model)
    assert outcome.verdict == "warning" and "system message left out" in outcome.detail


def test_a_template_that_rewrites_earlier_turns_needs_marks_for_sft(models, tmp_path):
    model = with_template(models, tmp_path, "{% for m in messages %}{% if loop.last or m.role == 'user' %}"
                          "{{ m.content }}|{% endif %}{% endfor %}{% if add_generation_prompt %}>{% endif %}")
    (outcome,) = check_chat_template(model)
    assert outcome.verdict == "warning" and "{% generation %}" in outcome.advice


def test_a_template_that_raises_is_an_error(models, tmp_path):
    with pytest.raises(ModelError, match="refuses the messages.*no talk"):
        check_chat_template(with_template(models, tmp_path, "{{ raise_exception('no talk') }}"))


def test_without_a_template_there_is_nothing_to_check(plain):
    (outcome,) = check_chat_template(of(plain))
    assert outcome.verdict == "does not apply"
    assert check_stop_tokens(of(plain))[0].verdict == "works"


@pytest.mark.parametrize(("kind", "turns", "tools", "role", "calls"), [
    ("qwen2.5", "append-only: an episode is one segment", "are written", "the role tool is known", "hermes"),
    ("qwen3", "append-only while tools answer: each message of a user begins a new segment", "are written",
     "the role tool is known", "hermes"),
    ("llama3.1", "append-only: an episode", "are written", "the role tool is known", "llama3"),
    ("gemma", "append-only: an episode", "are left out", "results of tools become messages of the user", "json"),
    ("mistral", "append-only while tools answer", "are written", "the role tool is known", "mistral"),
])
def test_how_episodes_of_several_turns_are_written(kind, turns, tools, role, calls, plain, tmp_path):
    model = shutil.copytree(plain, tmp_path / "m")
    chat_templates.make_chat_tokenizer(model, kind)
    (outcome,) = check_turns(of(model))
    assert outcome.verdict == "works" and outcome.detail.startswith(turns)
    assert f"tools {tools}; {role}; calls are read as {calls!r}" in outcome.detail
    assert ("describe tools" in outcome.advice) is (tools == "are left out")


def test_a_template_that_rewrites_each_turn_is_a_warning(models, tmp_path):
    model = with_template(models, tmp_path, "{% for m in messages %}<|im_start|> {{ m.role }} "
                          "{{ m.content.split('</think>')[-1] }}<|im_end|>{% endfor %}"
                          "{% if add_generation_prompt %}<|im_start|> assistant{% endif %}")
    (outcome,) = check_turns(model)
    assert outcome.verdict == "warning" and "each turn is a segment of its own" in outcome.detail


def test_a_template_that_refuses_a_second_turn_is_an_error(models, tmp_path):
    model = with_template(models, tmp_path, "{% if messages | length > 2 %}{{ raise_exception('one turn') }}{% endif %}"
                          "{{ messages[0].content }}")
    with pytest.raises(ModelError, match="refuses the messages.*one turn"):
        check_turns(model)


def test_without_a_template_there_are_no_turns_to_check(plain):
    (outcome,) = check_turns(of(plain))
    assert outcome.verdict == "does not apply" and "use a tokenizer with a template" in outcome.advice
