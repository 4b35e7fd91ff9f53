"""Rows with tools, tool calls and tool results: what carries loss, in which forms they may be written, what is
refused. Expected tokens are joined here from texts written by hand, as sampling turn by turn would give them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_ray.config.data import DemonstrationsConfig, PreferencesConfig, PromptsConfig
from rlhf_ray.data.answers import Prefills
from rlhf_ray.data.chat import PromptFormat, PromptText, checked_messages
from rlhf_ray.data.demonstrations import load_demonstrations
from rlhf_ray.data.load_report import LoadReport
from rlhf_ray.data.preferences import load_preferences
from rlhf_ray.data.prompts import stream_prompts
from rlhf_ray.data.tool_messages import checked_tools
from rlhf_ray.data.tool_template import TOOL_TEMPLATE
from rlhf_ray.errors import DataError, ModelError
from rlhf_ray.records import SampleKey
from rlhf_ray.rewards.protocol import RewardRequest
from rlhf_ray.rewards.request_encoding import encode_request
from rlhf_ray.roles.prompt_input import PromptInput, formatted_prompt
from tests.layouts import CHATML, make_layout
from tests.pages import ROOT, fences

QWEN = """
{%- if tools %}{{ '<|im_start|>system\\nTools:' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif m.tool_calls %}{{ '<|im_start|>assistant' }}{% if m.content %}{{ '\\n' + m.content }}{% endif %}
{%- for call in m.tool_calls %}{% if call.function is defined %}{% set call = call.function %}{% endif %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""".strip()
"""As Qwen2.5's for messages of these kinds: a text as arguments would be written within quotation marks."""
MARKED = (QWEN.replace("{{ '<|im_start|>assistant' }}", "{{ '<|im_start|>assistant' }}{% generation %}")
          .replace("{%- endfor %}{{ '<|im_end|>\\n' }}",
                   "{%- endfor %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}")
          .replace("{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}",
                   "{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}{% generation %}{{ m.content + "
                   "'<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
                   "{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"))
"""The same with marks; that of a call begins before the line break of the header."""
CONCATENATES = QWEN.replace("(call.arguments | tojson)", "call.arguments")
"""Joins the arguments to a text, as DeepSeek's does: an object is refused."""
PRINTS = QWEN.replace("' + (call.arguments | tojson) + '", "' }}{{ call.arguments }}{{ '")
"""Prints the arguments, an object in Python's form."""
REWRITES = QWEN.replace("{{ '<|im_start|>assistant' }}",
                        "{{ '<|im_start|>assistant' }}{% if loop.last %}{{ '\\n<think>\\n\\n</think>\\n' }}{% endif %}")
"""Writes an empty think block into the last turn alone, as Qwen3's does."""
LOOKUP = {"type": "function", "function": {"name": "lookup", "description": "Price.", "parameters": {
    "type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}}}
TOOLS = [LOOKUP]


def call(name: str = "lookup", **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


USER = {"role": "user", "content": "What is it?"}
CALLS = {"role": "assistant", "content": None, "tool_calls": [call(item="plum")]}
RESULT = {"role": "tool", "name": "lookup", "content": "37"}
ANSWER = {"role": "assistant", "content": "It is 37."}
TALK = [USER, CALLS, RESULT, ANSWER]
CALLED = '<tool_call>\n{"name": "lookup", "arguments": {"item": "plum"}}\n</tool_call><|im_end|>'
ASK = "<|im_end|>\n<|im_start|>assistant\n"
PARTS = [(False, f"<|im_start|>system\nTools:\n{json.dumps(LOOKUP)}<|im_end|>\n<|im_start|>user\nWhat is it?{ASK}"),
         (True, CALLED), (False, f"\n<|im_start|>user\n<tool_response>\n37\n</tool_response>{ASK}"),
         (True, "It is 37.<|im_end|>")]
"""(whether it is sampled, text) of what `QWEN` makes of `TALK`."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_layout(tmp_path_factory.mktemp("layout") / "base", "chatml")


@pytest.fixture
def chat(directory):
    """chat(template) -> the tokenizer with it."""
    from transformers import AutoTokenizer

    def make(template: str = QWEN) -> Any:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        tokenizer.chat_template = template
        return tokenizer

    return make


def demonstration(tokenizer: Any, path: str) -> tuple[list[int], list[bool]]:
    rows, _ = load_demonstrations(DemonstrationsConfig(path=path, messages="messages", max_tokens=1024), tokenizer)
    return rows.row(0, "tokens").tolist(), rows.row(0, "loss_mask").tolist()


def joined(tokenizer: Any, parts: list[tuple[bool, str]]) -> tuple[list[int], list[bool]]:
    """(tokens, True on the sampled ones) of texts that are encoded one by one."""
    tokens, mask = [], []
    for sampled, text in parts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens += ids
        mask += [sampled] * len(ids)
    return tokens, mask


def test_loss_is_on_exactly_the_tokens_that_the_turns_would_have_sampled(chat, write_jsonl):
    tokenizer = chat()
    assert demonstration(tokenizer, write_jsonl({"messages": TALK, "tools": TOOLS})) == joined(tokenizer, PARTS)


def test_so_it_is_with_several_calls_a_content_beside_them_and_results_without_end(chat, write_jsonl):
    """The project's own template joins neighbouring results into one turn."""
    tokenizer = chat(TOOL_TEMPLATE)
    both = {"role": "assistant", "content": "I look.", "tool_calls": [call(item="plum"), call(item="pear")]}
    talk = [{"role": "system", "content": "Be brief."}, USER, both, RESULT, {**RESULT, "content": "21"}, ANSWER, USER,
            {**ANSWER, "content": "Bye"}]
    system = tokenizer.apply_chat_template(talk[:1], tools=TOOLS, tokenize=False)
    assert json.dumps(LOOKUP) in system
    other = CALLED.replace("plum", "pear")
    assert demonstration(tokenizer, write_jsonl({"messages": talk, "tools": TOOLS})) == joined(tokenizer, [
        (False, f"{system}<|im_start|>user\nWhat is it?{ASK}"),
        (True, f"I look.\n{CALLED.removesuffix('<|im_end|>')}\n{other}"),
        (False, "\n<|im_start|>user\n<tool_response>\n37\n</tool_response>\n<tool_response>\n21\n</tool_response>"
                + ASK),
        (True, "It is 37.<|im_end|>"), (False, f"\n<|im_start|>user\nWhat is it?{ASK}"), (True, "Bye<|im_end|>")])


def test_so_it_is_where_the_template_marks_the_assistants_text(chat, write_jsonl):
    tokenizer = chat(MARKED)
    tokens, mask = demonstration(tokenizer, write_jsonl({"messages": TALK, "tools": TOOLS}))
    runs = "".join("x" if loss else " " for loss in mask).split()
    assert tokenizer.decode(tokens) == "".join(text for _, text in PARTS)
    ends = [i for i, token in enumerate(tokens) if token == tokenizer.convert_tokens_to_ids("<|im_end|>")]
    learned = [tokenizer.decode([t for t, loss in zip(tokens[a:b], mask[a:b], strict=True) if loss])
               for a, b in ((0, ends[2] + 1), (ends[2] + 1, len(tokens)))]
    assert len(runs) == 2 and learned == [CALLED, "It is 37.<|im_end|>"]


@pytest.mark.parametrize("calls", [
    [{"name": "lookup", "arguments": {"item": "plum"}}],
    [{"name": "lookup", "arguments": '{"item":"plum"}'}],
    [{"id": "call_1", "type": "function", "function": {"name": "lookup", "arguments": '{"item": "plum"}'}}],
])
@pytest.mark.parametrize("template", [QWEN, CONCATENATES, PRINTS])
def test_calls_come_to_the_same_in_whatever_form_they_and_the_template_have_them(chat, write_jsonl, calls, template):
    tokenizer = chat(template)
    row = {"messages": [USER, {"role": "assistant", "tool_calls": calls}, {**RESULT, "tool_call_id": "call_1"},
                        ANSWER], "tools": TOOLS}
    assert demonstration(tokenizer, write_jsonl(row)) == joined(tokenizer, PARTS)


def test_the_row_of_the_documentation_is_read(chat, write_jsonl):
    [row] = [json.loads(fence.text) for fence in fences(ROOT / "docs/data.md")
             if fence.language == "json" and '"tool_calls"' in fence.text]
    tokenizer = chat(TOOL_TEMPLATE)
    tokens, mask = demonstration(tokenizer, write_jsonl(row))
    learned = tokenizer.decode([token for token, loss in zip(tokens, mask, strict=True) if loss])
    assert learned == f"{CALLED}A plum costs 37.<|im_end|>"


@pytest.mark.parametrize("tools", [json.dumps(TOOLS), [LOOKUP["function"]], json.dumps([LOOKUP["function"]])])
def test_tools_come_to_the_same_as_schemas_functions_or_their_json_text(chat, write_jsonl, tools):
    tokenizer = chat()
    assert demonstration(tokenizer, write_jsonl({"messages": TALK, "tools": tools})) == joined(tokenizer, PARTS)


def test_rows_of_parquet_whose_tools_differ_are_those_of_json_lines(chat, write_jsonl, tmp_path):
    """Parquet gives every object the keys of all."""
    other = {"type": "function", "function": {"name": "add", "description": "Sum.", "parameters": {
        "type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}}}
    rows = [{"messages": TALK, "tools": [LOOKUP, other]},
            {"messages": [USER, {**CALLS, "tool_calls": [call("add", x=1)]}, RESULT, ANSWER], "tools": [other]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    [one, other_rows] = (load_demonstrations(DemonstrationsConfig(path=path, messages="messages"), chat())[0]
                         for path in (write_jsonl(*rows), str(tmp_path / "rows.parquet")))
    assert one.tokens.tolist() == other_rows.tokens.tolist() and len(one) == 2


def test_prompts_have_the_tools_and_keep_the_row(chat, write_jsonl):
    tokenizer = chat()
    row = {"prompt": [USER], "tools": TOOLS, "answer": 37}
    [block] = stream_prompts(PromptsConfig(path=write_jsonl(row)), tokenizer, LoadReport("rows"))
    assert block.texts == [PARTS[0][1]] and block.metadata == [{"tools": TOOLS, "answer": 37}]
    [later] = stream_prompts(PromptsConfig(path=write_jsonl({**row, "prompt": TALK[:3]})), tokenizer, LoadReport("r"))
    assert later.texts == ["".join(text for _, text in PARTS[:3])]


def test_a_text_that_becomes_a_message_has_the_tools_and_another_is_refused(chat, write_jsonl):
    path = write_jsonl({"prompt": "What is it?", "tools": TOOLS})
    [block] = stream_prompts(PromptsConfig(path=path, as_chat=True), chat(), LoadReport("rows"))
    assert block.texts == [PARTS[0][1]]
    with pytest.raises(DataError, match="line 1: the row has tools, and column 'prompt' is a text, .* set as_chat"):
        list(stream_prompts(PromptsConfig(path=path), chat(), LoadReport("rows")))


@pytest.mark.parametrize("row", [
    {"prompt": [USER], "chosen": TALK[1:], "rejected": [CALLS, RESULT, {**ANSWER, "content": "No."}]},
    {"prompt": TALK[:3], "chosen": [ANSWER], "rejected": "No."},
    {"prompt": TALK[:3], "chosen": "It is 37.", "rejected": "No."},
    {"chosen": TALK, "rejected": [*TALK[:3], {**ANSWER, "content": "No."}]},
])
def test_pairs_have_the_tools_and_the_calls(chat, write_jsonl, row):
    tokenizer = chat()
    if isinstance(row["chosen"], list) and isinstance(row["rejected"], str):
        row = {**row, "rejected": [{**ANSWER, "content": row["rejected"]}]}
    pairs, _, _ = load_preferences(PreferencesConfig(path=write_jsonl({**row, "tools": TOOLS}), held_out=0), tokenizer)
    whole = "".join(text for _, text in PARTS)
    assert tokenizer.decode(pairs.chosen.row(0, "tokens")) == whole
    assert tokenizer.decode(pairs.rejected.row(0, "tokens")) == whole.replace("It is 37.", "No.")


def test_a_side_may_be_a_call_alone_and_one_that_was_cut_may_not(chat, write_jsonl):
    tokenizer = chat()
    row = {"prompt": [USER], "chosen": [CALLS], "rejected": [ANSWER], "tools": TOOLS}
    pairs, _, _ = load_preferences(PreferencesConfig(path=write_jsonl(row), held_out=0), tokenizer)
    tokens, mask = pairs.chosen.row(0, "tokens"), pairs.chosen.row(0, "loss_mask")
    assert tokenizer.decode(tokens[mask]) == CALLED
    with pytest.raises(DataError, match="line 1: column 'chosen' calls tools, and chosen_finished says that the resp"):
        load_preferences(PreferencesConfig(path=write_jsonl({**row, "chosen_finished": False}), held_out=0), tokenizer)


@pytest.mark.parametrize(("load", "row"), [
    ("demonstrations", {"messages": TALK[::3]}),
    ("prompts", {"prompt": [USER]}),
    ("preferences", {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "No."}]}),
])
@pytest.mark.parametrize("template", [CHATML, CHATML + "{% if tools is defined %}{% endif %}"])
def test_a_template_that_leaves_tools_out_is_refused_with_the_line_and_the_fix(chat, write_jsonl, load, row, template):
    tokenizer, path = chat(template), write_jsonl(row, {**row, "tools": TOOLS})
    loads = {
        "demonstrations": lambda: load_demonstrations(DemonstrationsConfig(path=path, messages="messages"), tokenizer),
        "prompts": lambda: list(stream_prompts(PromptsConfig(path=path), tokenizer, LoadReport("rows"))),
        "preferences": lambda: load_preferences(PreferencesConfig(path=path, held_out=0), tokenizer),
    }
    with pytest.raises(DataError, match="line 2: the row has tools, which .* leaves out; use a template that writes"):
        loads[load]()


def test_prompts_of_the_command_line_have_the_tools_of_their_rows(chat):
    form = PromptFormat(chat(), "prompt")
    asked = [PromptInput(content, "rows, line 1", {"tools": TOOLS}) for content in ([USER], USER["content"])]
    assert [formatted_prompt(form, prompt, True).text for prompt in asked] == [PARTS[0][1]] * 2
    with pytest.raises(DataError, match="rows, line 1: the row has tools, and the prompt is a text"):
        formatted_prompt(form, asked[1], False)


def test_a_reward_model_reads_the_tools_and_calls_as_in_its_training(chat):
    """If its own template writes tools; one that does not reads the messages alone."""
    request = RewardRequest(
        key=SampleKey(0, 0, 0), prompt="", response="It is 37.", tokens=np.zeros(0, np.int32),
        response_mask=np.zeros(0, bool), finish_reason="stop", metadata={"tools": TOOLS},
        messages=checked_messages(TALK[:3], "row 1", "prompt"))
    assert encode_request(request, chat(), pair=False).ids.tolist() == joined(chat(), PARTS)[0]
    plain = replace(request, messages=[USER])
    assert encode_request(plain, chat(CHATML), pair=False).ids.tolist() == joined(
        chat(), [(False, f"<|im_start|>user\nWhat is it?{ASK}"), PARTS[3]])[0]


def test_a_template_that_leaves_results_out_is_refused(chat, write_jsonl):
    template = QWEN.replace("+ m.content + '\\n</tool_response>", "+ '\\n</tool_response>")
    with pytest.raises(DataError, match="line 1: a message has the role 'tool', which .* leaves out"):
        demonstration(chat(template), write_jsonl({"messages": TALK, "tools": TOOLS}))


def test_a_template_that_rewrites_an_earlier_call_is_refused(chat, write_jsonl):
    with pytest.raises(DataError, match="line 1: .* assistant's turn 4 is not a part of the text: the template render"):
        demonstration(chat(REWRITES), write_jsonl({"messages": TALK, "tools": TOOLS}))


def test_a_template_that_refuses_the_messages_is_named(chat, write_jsonl):
    template = QWEN.replace("{%- if m.role == 'tool' %}", "{%- if m.role == 'tool' %}{{ raise_exception('no tools') }}")
    with pytest.raises(ModelError, match=r"line 1: .* refuses the messages, of roles \['user', .*\]: no tools"):
        demonstration(chat(template), write_jsonl({"messages": TALK, "tools": TOOLS}))


@pytest.mark.parametrize(("tools", "said"), [
    ("lookup", "rows, line 1: tools must be a list of JSON schemas, or its JSON text, not 'lookup'"),
    ({"lookup": {}}, "tools must be a list of JSON schemas"),
    ([{"type": "function"}], "a tool of tools must be an object with a name, or have one under 'function'"),
    (["lookup"], "must be an object with a name"),
    ([{"function": {"name": ""}}], "must be an object with a name"),
])
def test_what_is_no_tool_is_refused(tools, said):
    with pytest.raises(DataError, match=said):
        checked_tools(tools, "rows, line 1")


@pytest.mark.parametrize(("message", "said"), [
    ({**USER, "tool_calls": [call()]}, "role 'user' has tool_calls, and only the assistant calls tools"),
    ({**CALLS, "tool_calls": call()}, "tool_calls must be a list of calls"),
    ({**CALLS, "tool_calls": ["lookup"]}, "a call of tool_calls must be an object with a name"),
    ({**CALLS, "tool_calls": [{"name": "lookup", "arguments": "plum"}]}, "of a call of 'lookup' must be an object"),
    ({**CALLS, "tool_calls": [{"name": "lookup", "arguments": "[1]"}]}, r"its JSON text, not '\[1\]'"),
    ({**CALLS, "content": 3}, "must be a text, not int"),
    ({"role": "assistant", "tool_calls": []}, "each message must be an object with role and content"),
    ({"role": "assistant", "content": None}, "must be a text, not NoneType"),
])
def test_what_is_no_call_is_refused(message, said):
    with pytest.raises(DataError, match=f"rows, line 1: column 'messages.*{said}"):
        checked_messages([message], "rows, line 1", "messages")


def test_arguments_of_a_call_keep_null_if_they_are_a_text():
    [one, other] = checked_messages(
        [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": written}]}
         for written in ({"a": None}, '{"a": null}')], "rows, line 1", "messages")
    assert [m["tool_calls"][0]["function"]["arguments"] for m in (one, other)] == [{}, {"a": None}]


def test_what_a_prompt_begins_of_the_answer_is_looked_up_once_for_all_tools(chat, monkeypatch):
    tokenizer, rendered = chat(), []
    real = type(tokenizer).apply_chat_template
    monkeypatch.setattr(type(tokenizer), "apply_chat_template",
                        lambda *args, **kwargs: rendered.append(1) or real(*args, **kwargs))
    prefills = Prefills(tokenizer)
    for name in ("one", "two", "three"):
        assert prefills.of(PromptText("x", [USER], {"tools": [{"function": {"name": name}}]})) == ""
    assert len(rendered) == 2
