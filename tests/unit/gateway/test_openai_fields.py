"""OpenAI's chat completions without a server: what a body asks, what is refused, and what an answer looks like."""

from __future__ import annotations

import json

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from rlhf_ray.environments.protocol import ToolCall
from rlhf_ray.gateway import openai_chat
from rlhf_ray.gateway.chat import Refused
from rlhf_ray.gateway.fields import MOST_NESTED, parse_json
from tests.unit.gateway.shapes import checked, unknown_fields
from tests.unit.gateway.stand import calling, reply

HELLO = [{"role": "user", "content": "hello"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


def parsed(**fields):
    return openai_chat.parse({"model": "m", "messages": HELLO, **fields})


def refusal(**fields):
    with pytest.raises(Refused) as caught:
        parsed(**fields)
    assert caught.value.status == 400
    return str(caught.value)


def test_messages_of_all_roles_are_read():
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "1 + 1?", "name": "ann"},
        {"role": "assistant", "content": None, "reasoning_content": "add", "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": None},
    ]
    asked = parsed(messages=messages)
    assert asked.request.messages == [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "reasoning_content": "add",
         "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": ""},
    ]
    assert asked.ignored == ["messages[].name"]


@pytest.mark.parametrize("written, read", [
    ('{"a": {"b": [1, 2.5]}}', {"a": {"b": [1, 2.5]}}), ("{}", {}), ("[1]", "[1]"), ('{"a": 1', '{"a": 1'), ("", ""),
    ('{"a": NaN}', '{"a": NaN}'),
])
def test_arguments_are_an_object_or_the_text_as_it_is(written, read):
    call = {**CALL, "function": {"name": "add", "arguments": written}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
    assert parsed(messages=messages).request.messages[1]["tool_calls"][0]["function"]["arguments"] == read


def test_fields_that_act():
    asked = parsed(tools=[ADD], tool_choice="auto", max_tokens=9, stop="END", stream=True,
                   stream_options={"include_usage": True})
    assert (asked.request.tools, asked.request.max_tokens, asked.request.stop) == ([ADD], 9, ("END",))
    assert asked.stream and asked.show_usage and not asked.overridden and not asked.ignored
    assert parsed(max_tokens=9, max_completion_tokens=5).request.max_tokens == 5
    assert parsed(stop=["a", "b"]).request.stop == ("a", "b")
    assert parsed(tools=[ADD], tool_choice="none").request.tools == []
    plain = parsed(max_tokens=None, stop=None, stream=None, tools=None, stream_options=None)
    assert (plain.request.max_tokens, plain.request.stop, plain.stream, plain.request.tools) == (None, (), False, [])


def test_a_tools_schema_is_what_the_template_is_given():
    """With the "return" of `transformers.utils.get_json_schema`, in its order, and without what asks for constrained
    sampling."""
    function = {"name": "add", "strict": True, "description": "Adds.",
                "parameters": {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}}},
                "return": {"type": "integer"}}
    asked = parsed(tools=[{"type": "function", "function": function}])
    del function["strict"]
    assert json.dumps(asked.request.tools) == json.dumps([{"type": "function", "function": function}])
    assert asked.ignored == ["tools[].function.strict"]


@pytest.mark.parametrize("field", sorted(openai_chat.OVERRIDDEN))
def test_sampling_is_overridden(field):
    assert parsed(**{field: 1}).overridden == [field]
    assert parsed(**{field: None}).overridden == []


@pytest.mark.parametrize("field", ["user", "metadata", "store", "logprobs", "top_logprobs", "parallel_tool_calls",
                                   "service_tier", "prompt_cache_key", "safety_identifier", "made_up"])
def test_fields_without_effect_are_ignored(field):
    assert parsed(**{field: 1}).ignored == [field]
    assert parsed(**{field: None}).ignored == []


@pytest.mark.parametrize("field, value", [
    ("n", 2), ("n", True), ("logit_bias", {"5": 1}), ("response_format", {"type": "json_object"}),
    ("modalities", ["text", "audio"]), ("audio", {"voice": "a"}), ("functions", [{"name": "f"}]),
    ("function_call", {"name": "f"}), ("web_search_options", {}), ("guided_json", {}), ("structured_outputs", {}),
    ("chat_template", "x"), ("continue_final_message", True), ("add_generation_prompt", False), ("echo", True),
    ("tool_choice", "required"), ("tool_choice", {"type": "function", "function": {"name": "add"}}),
    ("tool_choice", {"type": "allowed_tools"}), ("max_tokens", 0), ("max_tokens", 1.5), ("max_tokens", True),
    ("max_completion_tokens", "9"), ("stop", ["a"] * 5), ("stop", [""]), ("stop", 7), ("stop", [1]), ("stream", "yes"),
    ("stream_options", {"include_usage": True}), ("tools", {}), ("tools", [1]), ("tools", [{"type": "custom"}]),
    ("messages", None), ("messages", []), ("messages", "hello"), ("messages", ["hello"]),
])
def test_what_would_ask_for_something_else_is_refused_by_name(field, value):
    assert field in refusal(**{field: value})


@pytest.mark.parametrize("fields", [
    {"n": 1}, {"logit_bias": {}}, {"response_format": {"type": "text"}}, {"modalities": ["text"]}, {"functions": []},
])
def test_values_that_ask_for_nothing_are_accepted(fields):
    asked = parsed(**fields)
    assert not asked.overridden and not asked.ignored


@pytest.mark.parametrize("message, named", [
    ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "'image_url'"),
    ({"role": "user", "content": [{"type": "input_audio"}]}, "'input_audio'"),
    ({"role": "function", "name": "f", "content": "1"}, "role"),
    ({"role": ["user"], "content": "1"}, "role"),
    ({"content": "1"}, "role"),
    ({"role": "user", "content": 5}, "content"),
    ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
    ({"role": "user", "content": "\ud800"}, "no character"),
    ({"role": "tool", "content": "1"}, "tool_call_id"),
    ({"role": "assistant", "function_call": {"name": "f"}}, "function_call"),
    ({"role": "assistant", "audio": {"id": "1"}}, "audio"),
    ({"role": "assistant", "tool_calls": [{"id": "1", "type": "custom"}]}, "tool_calls[0]"),
    ({"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f"}}]}, "arguments"),
    ({"role": "assistant", "tool_calls": [{**CALL, "id": None}]}, "id"),
])
def test_messages_that_cannot_be_read_are_refused_by_place(message, named):
    text = refusal(messages=[*HELLO, message])
    assert "messages[1]" in text and named in text


def test_nested_values_are_bounded():
    def nested(levels):
        value: dict = {}
        for _ in range(levels - 1):
            value = {"a": value}
        return [{"type": "function", "function": {"name": "f", "parameters": value}}]

    assert parsed(tools=nested(MOST_NESTED - 1)).request.tools == nested(MOST_NESTED - 1)
    assert f"more than {MOST_NESTED} lists and objects" in refusal(tools=nested(MOST_NESTED))
    arguments = "[" * 100_000 + "]" * 100_000
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    message = parsed(messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}]).request.messages[1]
    assert message["tool_calls"][0]["function"]["arguments"] == arguments
    deep = {**CALL, "function": {"name": "f", "arguments": '{"a": ' + "[" * 200 + "]" * 200 + "}"}}
    assert "lists and objects" in refusal(messages=[*HELLO, {"role": "assistant", "tool_calls": [deep]}])


@pytest.mark.parametrize("schema", [{"default": float("inf")}, {"title": "\ud800"}, {"\ud800": 1}])
def test_what_json_cannot_write_again_is_refused(schema):
    assert "tools[0]" in refusal(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}])


@pytest.mark.parametrize("body, why", [
    (b"", "not JSON"), (b"{", "not JSON"), (b"[]", "a list"), (b"null", "null"), (b"\xff{}", "not UTF-8"),
    (b'{"a": NaN}', "NaN"), (b'{"a": -Infinity}', "Infinity"), (b'{"a": ' + b"1" * 5000 + b"}", "not JSON"),
    (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
])
def test_bodies_that_are_no_json_object_are_refused(body, why):
    with pytest.raises(Refused, match=why) as caught:
        parse_json(body)
    assert caught.value.status == 400


def test_an_answer_is_a_chat_completion():
    body = openai_chat.answer(calling(ToolCall("add", {"a": 1}, "c1"), content="Let me.", turn=4), "policy", 1_700)
    completion = checked(ChatCompletion, body)
    assert unknown_fields(completion) == []
    assert body == {
        "id": "chatcmpl-4", "object": "chat.completion", "created": 1_700, "model": "policy",
        "choices": [{"index": 0, "logprobs": None, "finish_reason": "tool_calls", "message": {
            "role": "assistant", "content": "Let me.", "refusal": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]}}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
    }


def test_content_is_null_only_beside_calls_and_reasoning_is_the_one_field_more():
    without_text = openai_chat.answer(calling(ToolCall("add", {}, "c1")), "policy", 0)
    assert without_text["choices"][0]["message"]["content"] is None
    empty = openai_chat.answer(reply("", finish_reason="length"), "policy", 0)
    assert empty["choices"][0]["message"]["content"] == "" and empty["choices"][0]["finish_reason"] == "length"
    thought = openai_chat.answer(reply("2", reasoning="1 + 1"), "policy", 0)
    assert unknown_fields(checked(ChatCompletion, thought)) == ["choices.message.reasoning_content"]
    assert thought["choices"][0]["message"]["reasoning_content"] == "1 + 1"


def chunks_of(events):
    assert all(event.startswith(b"data: ") and event.endswith(b"\n\n") for event in events)
    return [event[6:-2].decode() for event in events]


def test_a_stream_has_the_order_of_chunks_of_a_stock_server():
    """Role, content, calls with their index, finish reason, usage, [DONE]: the order of vLLM 0.32
    (vllm/entrypoints/openai/chat_completion/serving.py)."""
    long = "words " * 40
    calls = [ToolCall("add", {"a": 1}, "c1"), ToolCall("sub", {"text": long}, "c2")]
    said = calling(*calls, content=long, reasoning="Hm.")
    *data, done = chunks_of(list(openai_chat.stream(said, "policy", 5, True)))
    chunks = [checked(ChatCompletionChunk, json.loads(each)) for each in data]
    assert done == "[DONE]"
    assert {(chunk.id, chunk.created, chunk.model) for chunk in chunks} == {("chatcmpl-0", 5, "policy")}
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == 10
    assert all(json.loads(each)["usage"] is None for each in data[:-1])
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert deltas[0].role == "assistant" and not any(delta.role for delta in deltas[1:])
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(deltas) - 1) + ["tool_calls"]
    kinds = ["reasoning" if delta.model_extra else "content" if delta.content else f"call {delta.tool_calls[0].index}"
             for delta in deltas[1:-1]]
    assert kinds == sorted(kinds, key=["reasoning", "content", "call 0", "call 1"].index)
    assert kinds.count("content") > 3 and kinds.count("call 1") > 3
    assert "".join(delta.content or "" for delta in deltas) == long
    begun = [delta.tool_calls[0] for delta in deltas if delta.tool_calls and delta.tool_calls[0].id]
    assert [(call.index, call.id, call.type, call.function.name) for call in begun] == [
        (0, "c1", "function", "add"), (1, "c2", "function", "sub")]
    written = "".join(delta.tool_calls[0].function.arguments for delta in deltas
                      if delta.tool_calls and delta.tool_calls[0].index == 1)
    assert json.loads(written) == {"text": long}


@pytest.mark.parametrize("content", ["", " ", "\n\n", "a" * 500, "für 天気 \U0001f600\n" * 50, " \r\n a\tb  "])
def test_a_streams_pieces_are_the_text(content):
    chunks = chunks_of(list(openai_chat.stream(reply(content), "policy", 0, False)))[:-1]
    assert "".join(json.loads(each)["choices"][0]["delta"].get("content") or "" for each in chunks) == content
    assert not any("usage" in json.loads(each) for each in chunks)
