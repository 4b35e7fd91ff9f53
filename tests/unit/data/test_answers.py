"""Answers in rows of training are what sampling gives: they continue the prompt and end at the first token that ends a
response. Prompts and whole conversations are rendered and tokenized by transformers here."""

import json

import pytest

from rlhf_ray.config.data import DemonstrationsConfig, PreferencesConfig, PromptsConfig
from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.data.answers import Prefills, TurnEnds, stop_tokens
from rlhf_ray.data.chat import PromptText
from rlhf_ray.data.demonstrations import load_demonstrations
from rlhf_ray.data.load_report import LoadReport
from rlhf_ray.data.preferences import load_preferences
from rlhf_ray.data.prompts import stream_prompts
from rlhf_ray.errors import DataError
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.models.stop_tokens import named_stop_tokens
from tests.layouts import LAYOUTS, SPECIAL_THINK, TEMPLATES, make_layout

USER = {"role": "user", "content": "Was it good?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("The film was good", "The film was bad"))
ENDS = {"two_ends": "<|end|>", "blank_first": "</s>"}
WRITES_ANSWERS = [name for name in LAYOUTS if name != "opened"]
"""Templates whose answered conversation continues the prompt."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("layouts")
    return {name: make_layout(root / name, name) for name in LAYOUTS}


@pytest.fixture
def layout(directories):
    """layout(name) -> the tokenizer."""
    return lambda name: load_tokenizer(NewModelConfig(architecture={}, tokenizer=str(directories[name])))


def as_sampled(tokenizer, name, answer, before=(USER,)):
    """(tokens of the prompt, those of the response) of a conversation, by transformers: up to the first end."""
    prompt = tokenizer.apply_chat_template([*before], add_generation_prompt=True, return_dict=True)["input_ids"]
    whole = tokenizer.apply_chat_template([*before, answer], return_dict=True)["input_ids"]
    if whole[: len(prompt)] != prompt:  # a line break at the border is one token with the next in the whole
        text = tokenizer.apply_chat_template([*before, answer], tokenize=False)
        asked = tokenizer.apply_chat_template([*before], add_generation_prompt=True, tokenize=False)
        whole = prompt + tokenizer(text.removeprefix(asked), add_special_tokens=False)["input_ids"]
    response = whole[len(prompt) :]
    end = tokenizer.convert_tokens_to_ids(ENDS.get(name, "<|im_end|>"))
    return prompt, response[: response.index(end) + 1]


def split(rows, i=0):
    tokens, mask = rows.row(i, "tokens"), rows.row(i, "loss_mask")
    return tokens[~mask].tolist(), tokens[mask].tolist()


def pairs_of(path, tokenizer, **options):
    return load_preferences(PreferencesConfig(path=path, held_out=0, **options), tokenizer)[0]


def demonstrations_of(path, tokenizer, **options):
    return load_demonstrations(DemonstrationsConfig(path=path, **options), tokenizer)


@pytest.mark.parametrize("name", WRITES_ANSWERS)
@pytest.mark.parametrize("as_messages", [False, True])
def test_rows_are_what_sampling_gives(name, as_messages, layout, write_jsonl):
    tokenizer = layout(name)
    chosen, rejected = ([GOOD], [BAD]) if as_messages else (GOOD["content"], BAD["content"])
    pairs = pairs_of(write_jsonl({"prompt": [USER], "chosen": chosen, "rejected": rejected}), tokenizer)
    assert split(pairs.chosen) == as_sampled(tokenizer, name, GOOD)
    assert split(pairs.rejected) == as_sampled(tokenizer, name, BAD)
    if as_messages:
        rows, _ = demonstrations_of(write_jsonl({"messages": [USER, GOOD]}), tokenizer, messages="messages")
    else:
        rows, _ = demonstrations_of(write_jsonl({"prompt": [USER], "response": GOOD["content"]}), tokenizer,
                                    prompt="prompt")
    assert split(rows) == as_sampled(tokenizer, name, GOOD)


@pytest.mark.parametrize("name", WRITES_ANSWERS)
def test_each_turn_of_a_conversation_ends_where_a_response_does(name, layout, write_jsonl):
    tokenizer = layout(name)
    rows, _ = demonstrations_of(write_jsonl({"messages": [USER, BAD, USER, GOOD]}), tokenizer, messages="messages")
    _, learned = split(rows)
    first, second = (as_sampled(tokenizer, name, answer)[1] for answer in (BAD, GOOD))
    assert learned == first + second
    sampled_from = tokenizer.apply_chat_template([USER, BAD, USER], add_generation_prompt=True, return_dict=True)
    assert rows.row(0, "tokens").tolist() == sampled_from["input_ids"] + second


def test_all_tokens_are_the_templates_own_with_a_blank_before_texts(layout, write_jsonl):
    tokenizer, messages = layout("blank_first"), [USER, BAD, USER, GOOD]
    rows, _ = demonstrations_of(write_jsonl({"messages": messages}), tokenizer, messages="messages")
    own = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert rows.row(0, "tokens").tolist() == own and own.count(tokenizer.convert_tokens_to_ids("▁")) > 0


def test_texts_are_tokenized_as_one_where_no_token_spans_their_border(layout, write_jsonl):
    tokenizer = layout("blank_first")
    path = write_jsonl({"prompt": "The film", "response": " was good"}, {"prompt": "The fil", "response": "m was good"})
    rows, _ = demonstrations_of(path, tokenizer, prompt="prompt")
    end = [tokenizer.eos_token_id]
    assert split(rows, 0)[0] + split(rows, 0)[1] == tokenizer("The film was good")["input_ids"] + end
    prompt, response = split(rows, 1)
    assert prompt == tokenizer("The fil")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(response) == ["m", "▁was", "▁good", "</s>"], "no blank before it"


def test_an_answer_that_cannot_follow_what_the_prompt_begins_is_refused(layout, write_jsonl):
    """DeepSeek-R1's kind: the prompt opens <think>, and the template writes an answer without it."""
    tokenizer = layout("opened")
    for rows in ({"prompt": [USER], "chosen": "good", "rejected": "bad"},
                 {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}):
        with pytest.raises(DataError, match=r"line 1: .*ends with '<think>\\n'.*could not be sampled"):
            pairs_of(write_jsonl(rows), tokenizer)
    with pytest.raises(DataError, match="could not be sampled"):
        demonstrations_of(write_jsonl({"messages": [USER, GOOD]}), tokenizer, messages="messages")


@pytest.mark.parametrize("name", ["opened", "wrapped"])
@pytest.mark.parametrize("written", ["It was.\n</think>\n\ngood", "<think>\nIt was.\n</think>\n\ngood"])
def test_an_answer_with_its_reasoning_continues_what_the_prompt_begins(name, written, layout, write_jsonl):
    tokenizer = layout(name)
    pairs = pairs_of(write_jsonl({"prompt": [USER], "chosen": written, "rejected": "No.</think>bad"}), tokenizer)
    text = tokenizer.decode(pairs.chosen.row(0, "tokens"))
    assert text.endswith("<|im_start|>assistant\n<think>\nIt was.\n</think>\n\ngood<|im_end|>")


def test_a_text_that_was_sampled_continues_the_prompt_as_it_is(layout, write_jsonl):
    """As the stage `preferences` writes it: the row says how each response ended."""
    tokenizer = layout("channels")
    sampled = "<|channel|>final<|message|>good"
    row = {"prompt": [USER], "chosen": sampled, "rejected": "odd", "chosen_finished": True, "rejected_finished": True}
    pairs = pairs_of(write_jsonl(row), tokenizer)
    assert split(pairs.chosen)[1] == tokenizer(sampled + "<|im_end|>", add_special_tokens=False)["input_ids"]
    assert split(pairs.rejected)[1] == tokenizer("odd<|im_end|>", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", WRITES_ANSWERS)
def test_an_assistant_that_speaks_first_is_learned_without_what_comes_before(name, layout, write_jsonl):
    tokenizer = layout(name)
    rows, _ = demonstrations_of(write_jsonl({"messages": [GOOD, USER, BAD]}), tokenizer, messages="messages")
    _, learned = split(rows)
    first, second = (as_sampled(tokenizer, name, answer)[1] for answer in (GOOD, BAD))
    assert tokenizer.decode(learned).split() == tokenizer.decode(first + second).split()


def test_a_default_system_message_carries_no_loss(layout, write_jsonl):
    tokenizer = layout("default_system")
    rows, _ = demonstrations_of(write_jsonl({"messages": [GOOD, USER, BAD]}), tokenizer, messages="messages")
    assert "Be kind." in tokenizer.decode(split(rows)[0]) and "Be kind." not in tokenizer.decode(split(rows)[1])


def test_the_end_of_the_templates_answers_ends_responses(directories, layout):
    for name, stops in (("base", ["<|endoftext|>", "<|im_end|>"]), ("two_ends", ["<|endoftext|>", "<|end|>"]),
                        ("chatml", ["<|im_end|>"])):
        tokenizer = layout(name)
        named = named_stop_tokens(tokenizer, ModelConfig(path=str(directories[name])))
        assert tokenizer.convert_ids_to_tokens(stop_tokens(tokenizer, named)) == stops
        assert bool(TurnEnds(tokenizer, named).note("m")) == (name == "base")


def test_the_ends_of_another_model_count_for_its_rows(layout, tmp_path, write_jsonl):
    """With `model.tokenizer`, the model's files name the ends, not those beside the tokenizer."""
    tokenizer = layout("two_ends")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
    config = DemonstrationsConfig(path=write_jsonl({"messages": [USER, GOOD]}), messages="messages")
    rows, _ = load_demonstrations(config, tokenizer, model=ModelConfig(path=str(tmp_path)))
    assert tokenizer.decode(split(rows)[1]) == "The film was good<|end|>\n<|endoftext|>"


def test_ends_and_beginnings_are_not_added_twice(layout, write_jsonl):
    tokenizer = layout("blank_first")
    rows, report = demonstrations_of(write_jsonl({"text": "<s>The film</s>"}, {"text": "The film"}), tokenizer)
    assert rows.row(0, "tokens").tolist() == rows.row(1, "tokens").tolist()
    assert report.already == {"<s>": 1, "</s>": 1} and "begin or end with '<s>' already: 1" in str(report)
    path = write_jsonl({"prompt": "<s>The film"})
    report = LoadReport(path)
    [block] = stream_prompts(PromptsConfig(path=path), tokenizer, report)
    assert block.tokens.tolist() == tokenizer("The film")["input_ids"] and report.already == {"<s>": 1}
    chats = layout("chatml")
    answers = {"chosen": "good<|im_end|>", "rejected": "bad"}
    pairs = pairs_of(write_jsonl({"prompt": [USER], **answers}), chats)
    assert chats.decode(split(pairs.chosen)[1]) == "good<|im_end|>"
    message = {**GOOD, "content": GOOD["content"] + "<|im_end|>"}
    rows, report = demonstrations_of(write_jsonl({"messages": [USER, message]}), chats, messages="messages")
    assert split(rows) == as_sampled(chats, "chatml", GOOD) and report.already == {"<|im_end|>": 1}


@pytest.mark.parametrize("prompt", [[USER], "a"])
def test_an_end_inside_an_answer_is_refused(prompt, layout, write_jsonl):
    row = {"prompt": prompt, "response": "a<|im_end|>b"}
    with pytest.raises(DataError, match=r"line 1: column 'response' contains '<\|im_end\|>'.*nothing after it"):
        demonstrations_of(write_jsonl(row), layout("chatml"), prompt="prompt")


@pytest.mark.parametrize(("key", "value"), [("weight", 0), ("train", False), ("loss", False)])
def test_a_message_without_loss_is_not_learned(key, value, layout, write_jsonl):
    tokenizer = layout("chatml")
    path = write_jsonl({"messages": [USER, {**BAD, key: value}, USER, {**GOOD, key: not value}]})
    rows, _ = demonstrations_of(path, tokenizer, messages="messages")
    assert tokenizer.decode(split(rows)[1]) == "The film was good<|im_end|>"
    assert "The film was bad" in tokenizer.decode(split(rows)[0])


def test_marked_messages_without_loss_are_not_learned(layout, write_jsonl):
    tokenizer = layout("chatml")
    tokenizer.chat_template = TEMPLATES["chatml"].replace(
        "{{ m.content }}<|im_end|>", "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>")
    path = write_jsonl({"messages": [USER, {**BAD, "weight": 0}, USER, GOOD]})
    rows, _ = demonstrations_of(path, tokenizer, messages="messages")
    assert tokenizer.decode(split(rows)[1]) == "The film was good<|im_end|>", "the end is outside of the mark"


def test_other_weights_and_pairs_without_loss_are_refused(layout, write_jsonl):
    with pytest.raises(DataError, match=r"line 1: .*weight=0.5.*write 0 or 1"):
        demonstrations_of(write_jsonl({"messages": [USER, {**GOOD, "weight": 0.5}]}), layout("chatml"),
                          messages="messages")
    with pytest.raises(DataError, match="not to be learned"):
        pairs_of(write_jsonl({"prompt": [USER], "chosen": [{**GOOD, "weight": 0}], "rejected": [BAD]}),
                 layout("chatml"))


def test_options_of_the_template_act_or_are_refused(layout, write_jsonl):
    tokenizer = layout("chatml")
    tokenizer.chat_template = "{% if brief %}Be brief. {% endif %}" + TEMPLATES["chatml"]
    options = {"chat_template_kwargs": {"brief": True}}
    rows, _ = demonstrations_of(write_jsonl({"messages": [USER, GOOD], **options}, {"messages": [USER, GOOD]}),
                                tokenizer, messages="messages")
    assert [tokenizer.decode(rows.row(i, "tokens")).startswith("Be brief.") for i in range(2)] == [True, False]
    pairs = pairs_of(write_jsonl({"prompt": [USER], "chosen": "good", "rejected": "bad", **options}), tokenizer)
    assert tokenizer.decode(pairs.chosen.row(0, "tokens")).startswith("Be brief.")
    [block] = stream_prompts(PromptsConfig(path=write_jsonl({"prompt": [USER], **options})), tokenizer,
                             LoadReport("rows"))
    assert block.texts[0].startswith("Be brief.")
    with pytest.raises(DataError, match="chat_template_kwargs has 'brief', which the tokenizer's chat template does"):
        demonstrations_of(write_jsonl({"messages": [USER, GOOD], **options}), layout("chatml"), messages="messages")


@pytest.mark.parametrize("key", ["tool_calls", "reasoning_content", "reasoning"])
def test_a_key_that_the_template_leaves_out_is_refused(key, layout, write_jsonl):
    message = {**GOOD, key: [{"name": "add"}] if key == "tool_calls" else "It was."}
    with pytest.raises(DataError, match=f"a message has {key}, which .* leaves out"):
        demonstrations_of(write_jsonl({"messages": [USER, message]}), layout("chatml"), messages="messages")
    tokenizer = layout("chatml")
    written = "{{ m." + key + " or '' }}{{ m.content }}"
    tokenizer.chat_template = TEMPLATES["chatml"].replace("{{ m.content }}", written)
    rows, _ = demonstrations_of(write_jsonl({"messages": [USER, message]}), tokenizer, messages="messages")
    assert tokenizer.decode(split(rows)[1]) != "The film was good<|im_end|>"


def test_messages_as_a_json_text_are_messages(layout, write_jsonl):
    tokenizer = layout("chatml")
    texts = [write_jsonl({"prompt": json.dumps([USER])}), write_jsonl({"prompt": [USER]}, name="own.jsonl")]
    one, other = (next(stream_prompts(PromptsConfig(path=path), tokenizer, LoadReport(path))) for path in texts)
    assert one.texts == other.texts and one.messages == other.messages
    rows, _ = demonstrations_of(write_jsonl({"messages": json.dumps([USER, GOOD])}), tokenizer, messages="messages")
    assert split(rows) == as_sampled(tokenizer, "chatml", GOOD)
    pairs = pairs_of(write_jsonl({"prompt": json.dumps([USER]), "chosen": json.dumps([GOOD]),
                                  "rejected": json.dumps([BAD])}), tokenizer)
    assert split(pairs.chosen) == as_sampled(tokenizer, "chatml", GOOD)


@pytest.mark.parametrize(("row", "fields", "said"), [
    ({"text": json.dumps([USER, GOOD])}, {}, "'text' holds chat messages written as a text.*data.messages"),
    ({"prompt": "a", "response": json.dumps([GOOD])}, {"prompt": "prompt"}, "'response' holds chat messages"),
    ({"prompt": str([USER]), "response": "b"}, {"prompt": "prompt"}, "looks like chat messages .* but is not JSON"),
])
def test_messages_as_a_text_where_texts_are_read_are_refused(row, fields, said, layout, write_jsonl):
    with pytest.raises(DataError, match=said):
        demonstrations_of(write_jsonl(row), layout("chatml"), **fields)


def test_lists_in_texts_that_are_no_messages_stay_texts(layout, write_jsonl):
    text = '[{"name": "Ann"}, {"name": "Bo"}]'
    rows, _ = demonstrations_of(write_jsonl({"text": text}), layout("chatml"))
    assert layout("chatml").decode(rows.tokens).startswith(text)


@pytest.mark.parametrize(("name", "prefill"), [
    ("opened", "<think>\n"), ("wrapped", "<think>\n"), ("chatml", ""), ("channels", ""), ("two_ends", ""),
    (SPECIAL_THINK, ""), ("blank_first", ""), ("default_system", ""),
])
def test_what_a_prompt_begins_of_the_answer(name, prefill, layout):
    tokenizer = layout(name)
    prefills = Prefills(tokenizer)
    asked = tokenizer.apply_chat_template([USER], add_generation_prompt=True, tokenize=False)
    assert prefills.of(PromptText(asked, [USER])) == prefill
    assert prefills.of(PromptText("Solve it.\nAssistant: <think>\n", None)) == "<think>\n"
    assert prefills.of(PromptText("a < b and c >", None)) == ""


def test_an_option_that_lets_the_prompt_begin_the_answer_counts(layout):
    """DeepSeek-V3.1's kind: `thinking: true` opens <think>."""
    tokenizer = layout("chatml")
    tokenizer.chat_template = TEMPLATES["opened"].replace("<think>\n", "{% if thinking %}<think>\n{% endif %}")
    prefills, begun = Prefills(tokenizer), {}
    for options in ({}, {"thinking": True}):
        asked = tokenizer.apply_chat_template([USER], add_generation_prompt=True, tokenize=False, **options)
        begun[bool(options)] = prefills.of(PromptText(asked, [USER], options))
    assert begun == {False: "", True: "<think>\n"}


DROPS = TEMPLATES["chatml"].replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
REASONED = {"role": "assistant", "content": "<think>\nIt was.\n</think>\n\ngood"}


@pytest.mark.parametrize("row", [{"messages": [USER, REASONED]}, {"prompt": [USER], "response": REASONED["content"]}])
def test_reasoning_that_the_template_leaves_out_is_learned(row, layout, write_jsonl):
    """DeepSeek-R1-Distill's kind before its prompts opened <think>."""
    tokenizer = layout("chatml")
    tokenizer.chat_template = DROPS
    fields = {"messages": "messages"} if "messages" in row else {"prompt": "prompt"}
    rows, _ = demonstrations_of(write_jsonl(row), tokenizer, **fields)
    assert tokenizer.decode(split(rows)[1]) == REASONED["content"] + "<|im_end|>"


def test_reasoning_that_the_template_leaves_out_of_earlier_turns_is_refused(layout, write_jsonl):
    tokenizer = layout("chatml")
    tokenizer.chat_template = DROPS
    with pytest.raises(DataError, match="turn 4 is not a part of the text"):
        demonstrations_of(write_jsonl({"messages": [USER, REASONED, USER, REASONED]}), tokenizer, messages="messages")


def test_an_answer_that_a_template_opens_and_cuts_is_refused(layout, write_jsonl):
    tokenizer = layout("channels")
    tokenizer.chat_template = TEMPLATES["channels"].replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    with pytest.raises(DataError, match="leaves out a part of the answer '<think>"):
        demonstrations_of(write_jsonl({"messages": [USER, REASONED]}), tokenizer, messages="messages")


@pytest.mark.parametrize("content", ["<think>\nIt was.\n</think>\n\ngood", "<think>It was.\n</think>\n\ngood"])
def test_a_message_may_repeat_the_tag_that_the_prompt_opens(content, layout, write_jsonl):
    tokenizer = layout("opened")
    tokenizer.chat_template = DROPS.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    path = write_jsonl({"messages": [USER, {**REASONED, "content": content}]})
    rows, _ = demonstrations_of(path, tokenizer, messages="messages")
    assert tokenizer.decode(split(rows)[0]).endswith("<think>\n")
    assert tokenizer.decode(split(rows)[1]) == "It was.\n</think>\n\ngood<|im_end|>"


def test_a_text_may_begin_with_another_channel_than_the_templates(layout, write_jsonl):
    """gpt-oss' kind: what was sampled begins with a channel for reasoning."""
    tokenizer = layout("channels")
    text = "<|channel|>analysis<|message|>It was.<|end|><|im_start|>assistant<|channel|>final<|message|>good"
    rows, _ = demonstrations_of(write_jsonl({"prompt": [USER], "response": text}), tokenizer, prompt="prompt")
    assert tokenizer.decode(split(rows)[1]) == text + "<|im_end|>"


def test_a_line_break_that_is_an_added_token_ends_no_response(layout, write_jsonl):
    """Gemma's kind of vocabulary, with a template that writes no end."""
    tokenizer = layout("chatml")
    tokenizer.add_tokens(["\n"])
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" \
                              "{% if add_generation_prompt %}assistant: {% endif %}"
    assert TurnEnds(tokenizer).stops == {tokenizer.eos_token_id}
    rows, _ = demonstrations_of(write_jsonl({"messages": [USER, {**GOOD, "content": "a\nb"}]}), tokenizer,
                                messages="messages")
    assert tokenizer.decode(split(rows)[1]) == "a\nb\n<|im_end|>"


def test_a_turn_that_the_next_one_ends_is_learned_with_that_end(layout, tmp_path, write_jsonl):
    """GLM-4's kind: no end is written, and the model names the token that begins the user's turn."""
    tokenizer = layout("two_ends")
    tokenizer.chat_template = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}" \
                              "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    named = [tokenizer.convert_tokens_to_ids(token) for token in ("<|user|>", "<|endoftext|>")]
    rows = {}
    for ends in (named, named[1:]):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        config = DemonstrationsConfig(path=write_jsonl({"messages": [USER, BAD, USER, GOOD]}), messages="messages")
        loaded, _ = load_demonstrations(config, tokenizer, model=ModelConfig(path=str(tmp_path)))
        rows[len(ends)] = tokenizer.decode(split(loaded)[1])
    bad, good = "\nThe film was bad", "\nThe film was good<|endoftext|>"
    assert rows == {2: bad + "<|user|>" + good, 1: bad + good}


def test_the_header_inside_of_a_mark_is_not_learned(layout, write_jsonl):
    """SmolLM3's kind."""
    tokenizer = layout("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n{{ m.content }}"
        "<|im_end|>\n{% endgeneration %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    path = write_jsonl({"messages": [USER, {**BAD, "weight": 0}, USER, GOOD]}, {"messages": [USER, GOOD]})
    rows, _ = demonstrations_of(path, tokenizer, messages="messages")
    assert tokenizer.decode(split(rows)[1]) == "The film was good<|im_end|>"
    assert split(rows, 1) == as_sampled(tokenizer, "chatml", GOOD)


def test_a_system_message_that_moves_to_the_last_question_is_in_the_prompt(layout, write_jsonl):
    """Mistral 0.3's kind: the template writes it before the last message if that is the user's."""
    tokenizer = layout("chatml")
    tokenizer.chat_template = (
        "{% set system = messages[0].content %}{% for m in messages[1:] %}<|im_start|>"
        "{% if m.role == 'user' and loop.last %}{{ system + ' ' }}{% endif %}{{ m.content }}<|im_end|>{% endfor %}")
    system = {"role": "system", "content": "Be kind."}
    row = {"prompt": [system, USER], "chosen": "good", "rejected": "bad"}
    prompt, response = split(pairs_of(write_jsonl(row), tokenizer).chosen)
    assert tokenizer.decode(prompt) == "<|im_start|>Be kind. Was it good?<|im_end|>"
    assert tokenizer.decode(response) == "good<|im_end|>"


def test_a_line_break_after_an_end_is_left_out(layout, write_jsonl):
    """As a template writes it, where texts were rendered before."""
    tokenizer = layout("chatml")
    text = tokenizer.apply_chat_template([USER, GOOD], tokenize=False)
    assert text.endswith("<|im_end|>\n")
    rows, report = demonstrations_of(write_jsonl({"text": text}), tokenizer)
    assert tokenizer.decode(rows.tokens) == text.rstrip() and report.already == {"<|im_end|>": 1}
    path = write_jsonl({"prompt": "a", "response": "good<|im_end|>\n"})
    rows, _ = demonstrations_of(path, tokenizer, prompt="prompt")
    assert tokenizer.decode(split(rows)[1]) == "good<|im_end|>"


def test_several_ends_after_a_text_are_one(layout, write_jsonl):
    """As a template writes them."""
    tokenizer = layout("two_ends")
    text = tokenizer.apply_chat_template([USER, GOOD], tokenize=False)
    assert text.endswith("good<|end|>\n<|endoftext|>")
    rows, report = demonstrations_of(write_jsonl({"text": text}), tokenizer)
    prompt, response = as_sampled(tokenizer, "two_ends", GOOD)
    assert rows.row(0, "tokens").tolist() == prompt + response
    assert report.already == {"<|end|>": 1}
    path = write_jsonl({"prompt": [USER], "response": GOOD["content"] + "<|end|>\n<|endoftext|>"})
    rows, _ = demonstrations_of(path, tokenizer, prompt="prompt")
    assert split(rows) == as_sampled(tokenizer, "two_ends", GOOD)


def test_a_key_whose_name_is_a_part_of_another_is_not_read(layout, write_jsonl):
    tokenizer = layout("chatml")
    tokenizer.chat_template = "{% if messages[-1].reasoning_content %}R{% endif %}" + TEMPLATES["chatml"]
    with pytest.raises(DataError, match="a message has reasoning, which .* leaves out"):
        demonstrations_of(write_jsonl({"messages": [USER, {**GOOD, "reasoning": "It was."}]}), tokenizer,
                          messages="messages")
    with pytest.raises(DataError, match="chat_template_kwargs has 'reason'"):
        demonstrations_of(write_jsonl({"messages": [USER, GOOD], "chat_template_kwargs": {"reason": True}}), tokenizer,
                          messages="messages")


def test_json_about_other_things_than_messages_stays_text(layout, write_jsonl):
    text = '[{"from": "London", "to": "Paris"}]'
    rows, _ = demonstrations_of(write_jsonl({"prompt": text, "response": text}), layout("chatml"), prompt="prompt")
    assert layout("chatml").decode(rows.tokens) == text + text + "<|im_end|>"


@pytest.mark.parametrize("tools", [[], None, "[]", "null"])
def test_no_tools_are_no_tools(tools, layout, write_jsonl):
    tokenizer = layout("chatml")
    rows, _ = demonstrations_of(write_jsonl({"messages": [USER, GOOD], "tools": tools}), tokenizer, messages="messages")
    assert split(rows) == as_sampled(tokenizer, "chatml", GOOD)


def test_many_added_tokens_do_not_slow_rows_down(layout, write_jsonl, monkeypatch):
    """Gemma 3 has 6,400, and transformers sorts them at each look."""
    tokenizer = layout("chatml")
    looks = []
    added = type(tokenizer).added_tokens_decoder
    monkeypatch.setattr(type(tokenizer), "added_tokens_decoder",
                        property(lambda self: looks.append(1) or added.fget(self)))
    counts = []
    for n in (1, 20):
        looks.clear()
        rows = [{"prompt": [USER], "chosen": f"good {i}", "rejected": "bad"} for i in range(n)]
        pairs_of(write_jsonl(*rows), tokenizer)
        counts.append(len(looks))
    assert counts[0] == counts[1]
