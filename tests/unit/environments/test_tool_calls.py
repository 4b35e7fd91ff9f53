"""Tool calls read from turns: good, malformed, and texts that only look like calls."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_ray.data.tool_template import TOOL_TEMPLATE
from rlhf_ray.environments.protocol import ToolCall
from rlhf_ray.environments.tool_calls import READERS, ToolCallParser, format_of
from rlhf_ray.errors import ConfigError
from tests.chat_templates import KINDS

ADD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
ADD_LLAMA = ADD.replace("arguments", "parameters")
HELP = '{"name": "help", "arguments": {}}'
CALLED = [ToolCall("add", {"a": 1, "b": 2})]
BOTH = [*CALLED, ToolCall("help", {})]


def parse(kind, text, **options):
    return ToolCallParser.of(kind).parse(text, **options)


def block(text):
    return f"<tool_call>\n{text}\n</tool_call>"


# Good calls

@pytest.mark.parametrize(("kind", "text", "calls", "content"), [
    ("hermes", block(ADD), CALLED, ""),
    ("hermes", f"I add.\n{block(ADD)}\n{block(HELP)}", BOTH, "I add."),
    ("hermes", f"<tool_call>{ADD}</tool_call>", CALLED, ""),
    ("hermes", f"<tool_call>\n{ADD}\n", CALLED, ""),  # a stop string left out the end
    ("hermes", block(ADD.replace("1", '"</tool_call>"')), [ToolCall("add", {"a": "</tool_call>", "b": 2})], ""),
    ("hermes", block('{"arguments": {"x": {"name": "inner"}}, "name": "f"}'),
     [ToolCall("f", {"x": {"name": "inner"}})], ""),
    ("llama3", ADD_LLAMA, CALLED, ""),
    ("llama3", f"<|python_tag|>{ADD_LLAMA}", CALLED, ""),
    ("llama3", f'{ADD_LLAMA}; {{"name": "help", "parameters": {{}}}}', BOTH, ""),
    ("llama3", f"<|python_tag|>{ADD_LLAMA};{HELP}", BOTH, ""),
    ("llama3", f"I add.\n{ADD_LLAMA}\nSo.", CALLED, "I add.\n\nSo."),
    ("mistral", f"[TOOL_CALLS] [{ADD}, {HELP}]", BOTH, ""),
    ("mistral", f"Well.[TOOL_CALLS][{ADD[:-1]}, \"id\": \"abcdefghi\"}}]",
     [ToolCall("add", {"a": 1, "b": 2}, "abcdefghi")], "Well."),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]help[ARGS]{}', BOTH, ""),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1, "b": 2}',
     [ToolCall("add", {"a": 1, "b": 2}, "abcdefghi")], ""),
    ("mistral", '[TOOL_CALLS]add{"a": 1, "b": 2}', CALLED, ""),
    ("json", ADD, CALLED, ""),
    ("json", f"[{ADD}, {HELP}]", BOTH, ""),
    ("json", f"I add.\n```json\n{ADD}\n```\nSo.", CALLED, "I add.\n\nSo."),
    ("json", f"```\n{ADD}\n```", CALLED, ""),
    ("json", json.dumps(json.loads(ADD), indent=2), CALLED, ""),
    ("json", ADD_LLAMA, CALLED, ""),
])
def test_good_calls(kind, text, calls, content):
    found = parse(kind, text)
    assert (found.calls, found.content, found.errors, found.reasoning) == (calls, content, [], "")


# Malformed calls

@pytest.mark.parametrize(("kind", "text", "reason"), [
    ("hermes", block("add(1, 2)"), "it is not valid JSON (Expecting value, character 1)"),
    ("hermes", block('{"name": "add", "arguments": {"a": 1,}}'), "it is not valid JSON"),
    ("hermes", '<tool_call>\n{"name": "add", "argum', "it ends before its JSON is complete"),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1', "it ends before its JSON is complete"),
    ("hermes", block('{"arguments": {}}'), 'it has no "name"'),
    ("hermes", block('{"name": 3, "arguments": {}}'), 'it has no "name"'),
    ("hermes", block('{"name": "add"}'), 'it has no "arguments"; write {} for a tool without arguments'),
    ("hermes", block('{"name": "add", "parameters": {}}'), 'it has no "arguments"'),
    ("hermes", block('{"name": "add", "arguments": "{}"}'), 'its "arguments" is a string, not an object'),
    ("hermes", block('{"name": "add", "arguments": [1]}'), 'its "arguments" is a list'),
    ("hermes", block(f"{ADD}\n{ADD}"), "follows the JSON object, where </tool_call> belongs"),
    ("hermes", block('{"name": "add", "arguments": {"a": NaN}}'), "it contains NaN, which is not JSON"),
    ("hermes", block('{"name": "add", "arguments": {"a": "\\ud800"}}'), "an escape that is no character"),
    ("hermes", block('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}"), "it is not valid JSON"),
    ("hermes", block('{"name": "add", "arguments": ' + '{"a": ' * 100_000 + "1" + "}" * 100_001), "nested too deeply"),
    ("hermes", block(f"[{ADD}]"), "it is a list, not an object"),
    ("llama3", "<|python_tag|>brave_search.call(query=1)", "<|python_tag|> is not followed by a JSON object"),
    ("llama3", '<|python_tag|>{"query": 1}', 'it has no "name"'),
    ("llama3", '{"name": "add", "parameters": {"a": 1', "it ends before its JSON is complete"),
    ("llama3", '{"name": "add", "parameters": [1]}', 'its "parameters" is a list'),
    ("mistral", "[TOOL_CALLS] add 1 and 2", "[TOOL_CALLS] is not followed by a list of calls"),
    ("mistral", f"[TOOL_CALLS] [{ADD}", "it ends before its JSON is complete"),
    ("mistral", '[TOOL_CALLS] [{"name": "add"}]', 'it has no "arguments"'),
    ("mistral", "[TOOL_CALLS]add[ARGS]{1}", "it is not valid JSON"),
    ("json", '{"name": "add", "arguments": {"a": 1,}}', "it is not valid JSON"),
    ("json", '```json\n{"name": "add", "arguments": 1}\n```', 'its "arguments" is a number'),
])
def test_a_malformed_call_says_what_is_wrong_and_what_is_expected(kind, text, reason):
    found = parse(kind, text)
    assert found.calls == [] and len(found.errors) == 1
    assert found.errors[0].startswith("The tool call cannot be read: ") and reason in found.errors[0]
    assert 'Write it as ' in found.errors[0] and '"name": "TOOL"' in found.errors[0]


def test_good_calls_beside_a_malformed_one_are_read():
    found = parse("hermes", f"{block(ADD)}x{block('no')}{block(HELP)}")
    assert found.calls == BOTH and len(found.errors) == 1 and found.content == "x"
    found = parse("mistral", f'[TOOL_CALLS] [{ADD}, {{"name": "add"}}, {HELP}]')
    assert found.calls == BOTH and len(found.errors) == 1
    found = parse("hermes", f"<tool_call>{{no {block(ADD)}")
    assert found.calls == CALLED and len(found.errors) == 1


@pytest.mark.parametrize("kind", ["hermes", "llama3", "mistral", "json"])
def test_the_form_that_an_error_names_can_be_read(kind):
    malformed = {"hermes": block("no"), "mistral": "[TOOL_CALLS] no"}.get(kind, '{"name": no}')
    (error,) = parse(kind, malformed).errors
    found = parse(kind, error.partition("Write it as ")[2])
    assert found.calls == [ToolCall("TOOL", {"ARGUMENT": "VALUE"})] and not found.errors


# Texts that only look like calls

@pytest.mark.parametrize(("kind", "text"), [
    ("hermes", "tool_call: add"), ("hermes", "<tool_call> is the tag that I write."), ("hermes", "a </tool_call>"),
    ("hermes", ADD), ("hermes", "<tool_call"), ("hermes", "< tool_call >{}</ tool_call >"),
    ("hermes", "[TOOL_CALLS] []"),
    ("llama3", '{"answer": 3}'), ("llama3", f"I would write {ADD_LLAMA}"), ("llama3", '{"name": "Ann", "age": 3}'),
    ("llama3", "{not json"), ("llama3", "{}"),
    ("mistral", "TOOL_CALLS: []"), ("mistral", ADD), ("mistral", "tool calls [1]"),
    ("json", "[1, 2]"), ("json", "[]"), ("json", '[{"name": "Ann", "age": 3}]'), ("json", "```json\n[3]\n```"),
    ("json", "[an aside] and so on"), ("json", f"It is {ADD}"),
])
def test_what_only_looks_like_a_call_is_content(kind, text):
    found = parse(kind, text)
    assert (found.content, found.calls, found.errors) == (text, [], [])


# Reasoning

@pytest.mark.parametrize(("text", "opened", "reasoning", "content"), [
    ("<think>\nhm\n</think>\n\n12", False, "hm", "12"),
    ("hm\n</think>\n\n12", False, "hm", "12"),
    ("hm\n</think>\n\n12", True, "hm", "12"),
    ("hm", True, "hm", ""),
    ("<think>\nhm", False, "hm", ""),
    ("<think>\n\n</think>\n\n12", False, "", "12"),
    ("12 <think>hm</think>", False, "", "12 <think>hm</think>"),
    ("12", False, "", "12"),
])
def test_reasoning_stands_at_the_beginning(text, opened, reasoning, content):
    found = parse("hermes", text, opened=opened)
    assert (found.reasoning, found.content, found.calls) == (reasoning, content, [])


def test_a_call_in_reasoning_is_none_and_a_tag_in_a_call_is_no_reasoning():
    found = parse("hermes", f"<think>{block(ADD)}</think>{block(HELP)}")
    assert found.calls == [ToolCall("help", {})] and found.reasoning == block(ADD)
    found = parse("hermes", block('{"name": "f", "arguments": {"x": "</think>"}}'))
    assert found.calls == [ToolCall("f", {"x": "</think>"})] and found.reasoning == ""


# Any text

PIECES = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<think>", "</think>",
          "```json\n", "```", "\n", " ", ";", "{", "}", "[", "]", '"', ":", ",", "\\", "\\u", "NaN", "-", "1e999",
          "name", '"name": ', '"arguments": ', ADD, ADD_LLAMA, HELP, "x", "\x00", "\ud800", "🙂"]
TEXTS = st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=20).map("".join))


@pytest.mark.parametrize("kind", READERS)
@given(text=TEXTS, opened=st.booleans())
def test_any_text_is_read(kind, text, opened):
    found = parse(kind, text, opened=opened)
    assert all(isinstance(call.arguments, dict) and call.name for call in found.calls)
    json.dumps([call.arguments for call in found.calls], ensure_ascii=False).encode()
    assert all(len(error) < 400 for error in found.errors)


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("piece", ["<tool_call>", "<tool_call>{", "[TOOL_CALLS]", "[", "{", "\n{", "\n[", "```json\n",
                                   "\n{}", '\n{"', '\n[{"a":', ";{", "</think>", f"{ADD};", "\n \n ", '"'])
def test_a_long_text_is_read_in_a_moment(kind, piece):
    text = piece * (60_000 // len(piece))
    began = time.process_time()
    parse(kind, text)
    assert time.process_time() - began < 5


# Formats by name and template

def test_auto_chooses_by_the_template():
    assert {kind: format_of(traits.template) for kind, traits in KINDS.items()} == {
        "qwen2.5": "hermes", "qwen3": "hermes", "llama3.1": "llama3", "gemma": "json", "mistral": "mistral"}
    assert ToolCallParser.of("auto", TOOL_TEMPLATE).name == "hermes" and ToolCallParser.of("auto").name == "json"
    assert format_of("<tool_call>\n<function=NAME>") == "qwen3_coder"
    assert format_of("<tool_call>NAME<arg_key>") == "glm45"


def test_another_name_is_another_parser_s():
    asked = []

    def external(name):
        asked.append(name)
        return {"other": lambda text, tools: (text[:2], [("add", '{"a": 1}'), ("add", "[1]"), ("add", "{")])}[name]

    found = ToolCallParser.of("other", external=external).parse("<think>hm</think>so add")
    assert (found.content, found.reasoning, found.calls) == ("so", "hm", [ToolCall("add", {"a": 1})])
    assert asked == ["other"]
    assert "'add' cannot be read: its \"arguments\" is a list" in found.errors[0]
    assert "ends before its JSON is complete" in found.errors[1]
    with pytest.raises(ConfigError, match="tool_format='other' is not one of auto, hermes, llama3, mistral, json"):
        ToolCallParser.of("other")


def test_a_parser_of_a_library_that_raises_is_an_error_of_the_call():
    def external(name):
        def read(text, tools):
            raise KeyError(text)
        return read

    found = ToolCallParser.of("other", external=external).parse("x")
    assert found.calls == [] and found.content == "x" and "cannot be read by the parser other" in found.errors[0]
