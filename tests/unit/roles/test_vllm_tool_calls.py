"""vLLM's own parsers of tool calls, and ours where they read the same."""

import pytest

from rlhf_ray.environments.protocol import ToolCall
from rlhf_ray.errors import ConfigError
from rlhf_ray.roles.engines.vllm_tool_calls import tool_call_parser
from tests.chat_templates import make_chat_tokenizer

ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}}}}
XML = "I add.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_chat_tokenizer(tmp_path_factory.mktemp("tokenizers"), "qwen3")


def test_a_format_that_is_none_of_ours_is_read_by_vllm_s_parser(tokenizer):
    parser = tool_call_parser("qwen3_coder", tokenizer)
    for _ in range(2):  # a parser keeps nothing of the text before
        found = parser.parse(f"<think>hm</think>{XML}", tools=[ADD])
        assert found.calls == [ToolCall("add", {"a": 1})] and found.content == "I add." and found.reasoning == "hm"
    assert parser.parse("no call").content == "no call"


def test_types_of_arguments_are_those_of_the_tools_of_the_episode(tokenizer):
    parser = tool_call_parser("qwen3_coder", tokenizer)
    as_text = {**ADD, "function": {**ADD["function"], "parameters": {
        "type": "object", "properties": {"a": {"type": "string"}}}}}
    assert [parser.parse(XML, tools=[tools]).calls[0].arguments for tools in (ADD, as_text, ADD)] == [
        {"a": 1}, {"a": "1"}, {"a": 1}]


def test_auto_finds_a_parser_of_vllm_by_the_template(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "<tool_call>\n<function=NAME>")
    assert tool_call_parser("auto", tokenizer).name == "qwen3_coder"


def test_our_hermes_reads_what_vllm_s_reads(tokenizer):
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

    text = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": "é\\n"}}\n</tool_call>\n<tool_call>\n' \
           '{"name": "add", "arguments": {}}'
    theirs = Hermes2ProToolParser(tokenizer).extract_tool_calls(text, None)
    ours = tool_call_parser("hermes", tokenizer).parse(text)
    assert [(c.function.name, c.function.arguments) for c in theirs.tool_calls] == [
        ("add", '{"a": "é\\n"}'), ("add", "{}")]
    assert ours.calls == [ToolCall("add", {"a": "é\n"}), ToolCall("add", {})]
    assert ours.content == theirs.content.strip()


def test_a_name_that_nobody_knows_and_a_parser_that_the_tokenizer_lacks_tokens_for_are_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"tool_format='nonsense' is no format .* auto, hermes, .*qwen3_coder"):
        tool_call_parser("nonsense", tokenizer)
    with pytest.raises(ConfigError, match=r"tool_format='llama3_json': vLLM's parser .* cannot be used"):
        tool_call_parser("llama3_json", tokenizer)
