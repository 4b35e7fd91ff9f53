"""Anthropic's messages without a server: what a body asks, what is refused, and what an answer looks like."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from anthropic.types import Message, ModelInfo, RawMessageStreamEvent
from pydantic import TypeAdapter

from rlhf_ray.environments.protocol import ToolCall
from rlhf_ray.gateway import anthropic_messages
from rlhf_ray.gateway.chat import Refused
from tests.unit.gateway.shapes import checked, unknown_fields
from tests.unit.gateway.stand import calling, reply

HELLO = [{"role": "user", "content": "hello"}]
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}


def parsed(**fields):
    return anthropic_messages.parse({"model": "m", "max_tokens": 9, "messages": HELLO, **fields})


def refusal(**fields):
    with pytest.raises(Refused) as caught:
        parsed(**fields)
    assert caught.value.status == 400
    return str(caught.value)


def test_a_conversation_with_tools_is_read():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1 + 1,"}, {"type": "text", "text": "please"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "add", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "Let me."},
            {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
            {"type": "tool_use", "id": "c2", "name": "add", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "2"},
            {"type": "tool_result", "tool_use_id": "c2", "is_error": True,
             "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "numbers"}]},
            {"type": "text", "text": "Go on."}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c3"}]},
    ]
    asked = parsed(messages=messages, system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}])

    def call(number, arguments):
        return {"id": number, "type": "function", "function": {"name": "add", "arguments": arguments}}

    assert asked.request.messages == [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "1 + 1,\nplease"},
        {"role": "assistant", "content": "Let me.", "reasoning_content": "add",
         "tool_calls": [call("c1", {"a": 1}), call("c2", {})]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": "Error: no\nnumbers"},
        {"role": "user", "content": "Go on."},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
    ]
    assert not asked.ignored and not asked.overridden


def test_an_error_that_says_so_is_not_prefixed():
    block = {"type": "tool_result", "tool_use_id": "c1", "content": "Error: no file", "is_error": True}
    assert parsed(messages=[{"role": "user", "content": [block]}]).request.messages[0]["content"] == "Error: no file"


def test_fields_that_act():
    asked = parsed(system="Be brief.", tools=[ADD], tool_choice={"type": "auto"}, stop_sequences=["END"], stream=True)
    assert asked.request.messages[0] == {"role": "system", "content": "Be brief."}
    assert asked.request.tools == [{"type": "function", "function": {
        "name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
    assert (asked.request.max_tokens, asked.request.stop, asked.stream) == (9, ("END",), True)
    assert parsed(tools=[ADD], tool_choice={"type": "none"}).request.tools == []
    assert parsed(messages=[{"role": "system", "content": "a"}, *HELLO]).request.messages[0]["role"] == "system"


@pytest.mark.parametrize("field", sorted(anthropic_messages.OVERRIDDEN))
def test_sampling_is_overridden(field):
    assert parsed(**{field: 1}).overridden == [field]


@pytest.mark.parametrize("fields, ignored", [
    ({"metadata": {"user_id": "a"}}, ["metadata"]), ({"service_tier": "auto"}, ["service_tier"]),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, ["tool_choice.disable_parallel_tool_use"]),
    ({"tools": [{**ADD, "type": "custom", "cache_control": {"type": "ephemeral"}}]}, ["tools[].cache_control"]),
    ({"system": [{"type": "text", "text": "a", "cache_control": {}}]}, ["messages[].content[].cache_control"]),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, ["thinking.budget_tokens"]),
])
def test_fields_without_effect_are_ignored(fields, ignored):
    asked = parsed(**fields)
    assert asked.ignored == ignored and not asked.overridden


@pytest.mark.parametrize("field, value", [
    ("tool_choice", {"type": "any"}), ("tool_choice", {"type": "tool", "name": "add"}), ("tool_choice", "auto"),
    ("mcp_servers", [{}]), ("container", "c"), ("prefill", "a"), ("output_format", {}),
    ("output_config", {"format": {"type": "json_schema"}}), ("context_management", {"edits": []}),
    ("tools", [{"type": "bash_20250124", "name": "bash"}]), ("tools", [{"name": "add"}]),
    ("tools", [{"name": "", "input_schema": {}}]), ("max_tokens", 0), ("stop_sequences", [""]), ("stream", 1),
    ("thinking", True), ("messages", []), ("messages", [1]),
])
def test_what_would_ask_for_something_else_is_refused_by_name(field, value):
    assert field in refusal(**{field: value})


@pytest.mark.parametrize("message, named", [
    ({"role": "user", "content": [{"type": "image", "source": {}}]}, "'image'"),
    ({"role": "user", "content": [{"type": "document"}]}, "'document'"),
    ({"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}, "'tool_use'"),
    ({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}]},
     "'image'"),
    ({"role": "user", "content": [{"type": "tool_result", "content": "2"}]}, "tool_use_id"),
    ({"role": "user", "content": []}, "is empty"),
    ({"role": "user", "content": [{"type": ["text"]}]}, "list"),
    ({"role": "tool", "content": "a"}, "role"),
    ({"role": "assistant", "content": [{"type": "server_tool_use"}]}, "'server_tool_use'"),
    ({"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": "{}"}]}, "input"),
    ({"role": "assistant", "content": "The answer is ("}, "begins its turns itself"),
])
def test_messages_that_cannot_be_read_are_refused(message, named):
    assert named in refusal(messages=[*HELLO, message])


SAID = [
    (reply("2", turn=3), False, "end_turn", ["text"]),
    (reply("2", finish_reason="length"), False, "max_tokens", ["text"]),
    (reply("2", stopped_by="END"), False, "stop_sequence", ["text"]),
    (calling(ToolCall("add", {"a": 1}, "c1"), ToolCall("sub", {"t": "long " * 40}, "c2")), False, "tool_use",
     ["tool_use", "tool_use"]),
    (calling(ToolCall("add", {"a": 1}, "c1"), content="Let me. " * 20), False, "tool_use", ["text", "tool_use"]),
    (reply("2", reasoning="one and one " * 9), True, "end_turn", ["thinking", "text"]),
    (reply("2", reasoning="one and one"), False, "end_turn", ["text"]),
    (reply(""), False, "end_turn", []),
]


@pytest.mark.parametrize("said, show_reasoning, stop_reason, kinds", SAID)
def test_an_answer_is_a_message(said, show_reasoning, stop_reason, kinds):
    message = checked(Message, anthropic_messages.answer(said, "policy", show_reasoning))
    assert unknown_fields(message) == []
    assert (message.id, message.model, message.role) == (f"msg_{said.turn}", "policy", "assistant")
    assert (message.stop_reason, message.stop_sequence) == (stop_reason, said.stopped_by)
    assert [block.type for block in message.content] == kinds
    assert (message.usage.input_tokens, message.usage.output_tokens) == (7, 3)


@pytest.mark.parametrize("said, show_reasoning, stop_reason, kinds", SAID)
def test_a_stream_builds_the_same_message(said, show_reasoning, stop_reason, kinds):
    """By the deltas alone, as https://docs.anthropic.com/en/api/messages-streaming has it."""
    events = []
    for raw in anthropic_messages.stream(said, "policy", show_reasoning):
        head, data = raw.decode().rstrip("\n").split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert head == f"event: {events[-1]['type']}" and raw.endswith(b"\n\n")
        assert unknown_fields(TypeAdapter(RawMessageStreamEvent).validate_python(events[-1], strict=True)) == []
    built = events[0]["message"]
    assert built["stop_reason"] is None and built["content"] == [] and built["usage"]["input_tokens"] == 7
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(built["content"])
            built["content"].append(event["content_block"])
            written = ""
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], built["content"][event["index"]]
            field = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
            if delta["type"] == "input_json_delta":
                written += delta["partial_json"]
            else:
                block[field[delta["type"]]] += delta[field[delta["type"]]]
        elif built["content"][event["index"]]["type"] == "tool_use":
            built["content"][event["index"]]["input"] = json.loads(written)
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    built |= events[-2]["delta"]
    built["usage"] = events[-2]["usage"]
    assert built == anthropic_messages.answer(said, "policy", show_reasoning)
    assert sum(event["type"] == "content_block_delta" for event in events) >= (5 if "Let me" in said.content else 0)


def test_models_and_errors_have_anthropics_form():
    model = ModelInfo.model_validate_json(json.dumps(anthropic_messages.model("policy", 0)), strict=True)
    assert model.id == "policy" and model.created_at == datetime.fromtimestamp(0, UTC)
    assert anthropic_messages.error(429, "later") == {
        "type": "error", "error": {"type": "rate_limit_error", "message": "later"}}
    assert anthropic_messages.error(500, "x")["error"]["type"] == "api_error"
    assert anthropic_messages.error(405, "x")["error"]["type"] == "invalid_request_error"
