"""Anthropic's messages: a body read into a `ChatRequest`, and a `ChatReply` written as an answer, as a stream, or an
error. Plain JSON: https://docs.anthropic.com/en/api/messages and /messages-streaming.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from rlhf_ray.environments.protocol import Message
from rlhf_ray.gateway.chat import ChatReply, ChatRequest
from rlhf_ray.gateway.fields import (
    OWN_TOKENS,
    TEXT_SEPARATOR,
    Asked,
    call_arguments,
    flag,
    function_tool,
    list_of_objects,
    pieces,
    plain,
    refuse,
    sort_fields,
    stop_texts,
    text,
    token_limit,
)
from rlhf_ray.user_code.loading import brief

MOST_STOPS = 64
"""Texts in `stop_sequences`; Anthropic documents no bound."""
NO_SERVER_TOOLS = "nothing runs on this side; send tools with an input_schema, and their results"

ACTS = frozenset({"model", "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream",
                  "thinking"})
OVERRIDDEN = frozenset({"temperature", "top_p", "top_k", "min_p", "seed", "output_config", "chat_template_kwargs"})
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "mcp_servers": (([],), NO_SERVER_TOOLS),
    "container": ((), NO_SERVER_TOOLS),
    "context_management": (({},), "the conversation is read as it is sent; leave out of messages what it should not "
                                  "contain"),
    "prefill": ((), "the policy begins its turns itself"),
    "output_format": ((), OWN_TOKENS + "; ask for the format in a message"),
}
BLOCK_FIELDS: Mapping[str, frozenset[str]] = {
    "text": frozenset({"type", "text"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error"}),
    "tool_use": frozenset({"type", "id", "name", "input"}),
    "thinking": frozenset({"type", "thinking", "signature"}),
    "redacted_thinking": frozenset({"type", "data"}),
}
BLOCKS = {"system": ("text",), "user": ("text", "tool_result"),
          "assistant": ("text", "thinking", "redacted_thinking", "tool_use")}
"""Types of blocks in the messages of a role."""
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
"""By `ChatReply.finish_reason`, as vLLM 0.32 has them (vllm/entrypoints/anthropic/serving.py)."""
ERRORS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 410: "not_found_error",
          413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}


def parse(body: Mapping[str, Any]) -> Asked:
    """The request in a body.

    Raises:
        Refused: status 400; names the field, its value and the reason.
    """
    overridden, ignored = sort_fields(body, ACTS, OVERRIDDEN, REFUSED)
    output = body.get("output_config")
    if isinstance(output, dict) and output.get("format") is not None:
        refuse(f"output_config.format={brief(output['format'])} is refused: {REFUSED['output_format'][1]}")
    messages = _system(body.get("system"), ignored)
    messages += _messages(body.get("messages"), ignored)
    tools = _tools(body.get("tools"), ignored)
    request = ChatRequest(
        messages=messages,
        tools=tools if _may_call(body.get("tool_choice"), ignored) else [],
        max_tokens=token_limit(body.get("max_tokens"), "max_tokens"),
        stop=stop_texts(body.get("stop_sequences"), "stop_sequences", MOST_STOPS),
    )
    return Asked(request, flag(body.get("stream"), "stream"), overridden, ignored,
                 show_reasoning=_shows_reasoning(body.get("thinking"), ignored))


def answer(reply: ChatReply, model: str, show_reasoning: bool) -> dict[str, Any]:
    """The body of a "message".

    Args:
        show_reasoning: with a block of thinking, if the policy wrote its reasoning.
    """
    return {**_message_head(reply, model), "content": _blocks(reply, show_reasoning),
            "stop_reason": _stop_reason(reply), "stop_sequence": reply.stopped_by,
            "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens}}


def stream(reply: ChatReply, model: str, show_reasoning: bool) -> Iterator[bytes]:
    """The events of a finished turn: the message's start, each block's start, deltas and stop, the reason why it ended
    with the usage, and the message's stop."""
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": 0}
    yield _event("message_start", message={**_message_head(reply, model), "content": [], "stop_reason": None,
                                           "stop_sequence": None, "usage": usage})
    for index, block in enumerate(_blocks(reply, show_reasoning)):
        begun, deltas = _deltas(block)
        yield _event("content_block_start", index=index, content_block=begun)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta={"stop_reason": _stop_reason(reply), "stop_sequence": reply.stopped_by},
                 usage={"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens})
    yield _event("message_stop")


def error(status: int, message: str) -> dict[str, Any]:
    """The body of an error."""
    kind = ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def model(name: str, created: int) -> dict[str, Any]:
    """The body about a model.

    Args:
        created: seconds since 1970.
    """
    return {"type": "model", "id": name, "display_name": name, "lifecycle": "active",
            "created_at": datetime.fromtimestamp(created, UTC).isoformat()}


def models(name: str, created: int) -> dict[str, Any]:
    """The body of the list of models."""
    return {"data": [model(name, created)], "has_more": False, "first_id": name, "last_id": name}


def _system(given: Any, ignored: list[str]) -> list[Message]:
    if given is None or given == "" or given == []:
        return []
    blocks = _given_blocks(given, "system", "system", ignored)
    return [{"role": "system", "content": TEXT_SEPARATOR.join(block["text"] for block in blocks)}]


def _messages(given: Any, ignored: list[str]) -> list[Message]:
    each = list_of_objects(given, "messages")
    if not each:
        refuse("messages is empty; a conversation has at least one")
    messages: list[Message] = []
    for place, message in enumerate(each):
        where, role = f"messages[{place}]", message.get("role")
        if not isinstance(role, str) or role not in BLOCKS:
            refuse(f"{where}.role is {brief(role)}, and must be user, assistant or system")
        ignored += [f"messages[].{name}" for name in message if name not in ("role", "content")]
        blocks = _given_blocks(message.get("content"), role, f"{where}.content", ignored)
        messages += [_assistant(blocks, where)] if role == "assistant" else _others(role, blocks, where, ignored)
    if messages[-1]["role"] == "assistant":
        refuse("the last message is the assistant's, whose beginning would be given to the policy; it begins its turns "
               "itself")
    return messages


def _given_blocks(content: Any, role: str, where: str, ignored: list[str]) -> list[dict[str, Any]]:
    """The blocks of a content; a text is one block."""
    if isinstance(content, str):
        return [{"type": "text", "text": text(content, where)}]
    blocks = list_of_objects(content, where)
    if not blocks:
        refuse(f"{where} is empty")
    for place, block in enumerate(blocks):
        kind = block.get("type")
        if kind not in BLOCKS[role]:
            refuse(f"{where}[{place}] has the type {brief(kind)}; here the policy reads blocks of the type "
                   f"{' or '.join(map(repr, BLOCKS[role]))} only")
        if kind == "text":
            text(block.get("text"), f"{where}[{place}].text")
        ignored += [f"messages[].content[].{name}" for name, value in block.items()
                    if value is not None and name not in BLOCK_FIELDS[kind]]
    return blocks


def _assistant(blocks: list[dict[str, Any]], where: str) -> Message:
    message: Message = {"role": "assistant", "content": _joined(blocks)}
    thoughts = [text(block.get("thinking"), f"{where}: the thinking of a block")
                for block in blocks if block["type"] == "thinking"]
    if any(thoughts):
        message["reasoning_content"] = TEXT_SEPARATOR.join(thoughts)
    calls = [_made_call(block, f"{where}: a block tool_use") for block in blocks if block["type"] == "tool_use"]
    if calls:
        message["tool_calls"] = calls
    return message


def _others(role: str, blocks: list[dict[str, Any]], where: str, ignored: list[str]) -> list[Message]:
    """The results of tools and the texts of a message, in their order; texts without a result between them are one."""
    messages: list[Message] = []
    texts: list[dict[str, Any]] = []
    for block in [*blocks, None]:
        if block is not None and block["type"] == "text":
            texts.append(block)
            continue
        if texts:
            messages.append({"role": role, "content": _joined(texts)})
            texts = []
        if block is not None:
            messages.append(_tool_result(block, f"{where}: a block tool_result", ignored))
    return messages


def _tool_result(block: dict[str, Any], where: str, ignored: list[str]) -> Message:
    content = block.get("content")
    content = "" if not content else _joined(_given_blocks(content, "system", f"{where}: its content", ignored))
    if flag(block.get("is_error"), f"{where}: is_error") and not content.startswith("Error"):
        content = f"Error: {content}"  # as the policy reads the errors of an environment's own tools
    return {"role": "tool", "tool_call_id": text(block.get("tool_use_id"), f"{where}: tool_use_id"), "content": content}


def _made_call(block: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(block.get("input"), dict):
        refuse(f"{where} has the input {brief(block.get('input'))}, and must have an object")
    return {"id": text(block.get("id"), f"{where}: id"), "type": "function",
            "function": {"name": text(block.get("name"), f"{where}: name"),
                         "arguments": plain(block["input"], f"{where}: input")}}


def _joined(blocks: list[dict[str, Any]]) -> str:
    return TEXT_SEPARATOR.join(block["text"] for block in blocks if block["type"] == "text")


def _tools(given: Any, ignored: list[str]) -> list[dict[str, Any]]:
    if given is None:
        return []
    tools = []
    for place, tool in enumerate(list_of_objects(given, "tools")):
        where = f"tools[{place}]"
        if tool.get("type") not in (None, "custom"):
            refuse(f"{where} has the type {brief(tool['type'])}: {NO_SERVER_TOOLS}")
        if tool.get("input_schema") is None:
            refuse(f"{where} has no input_schema")
        ignored += [f"tools[].{name}" for name, value in tool.items()
                    if value is not None and name not in ("type", "name", "description", "input_schema")]
        tools.append(function_tool({"name": tool.get("name"), "description": tool.get("description"),
                                    "parameters": tool["input_schema"]}, where))
    return tools


def _may_call(choice: Any, ignored: list[str]) -> bool:
    if choice is None:
        return True
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if not isinstance(choice, dict) or kind not in ("auto", "none"):
        refuse(f"tool_choice={brief(choice)} is refused: {OWN_TOKENS}; send the type 'auto' or 'none'")
    ignored += [f"tool_choice.{name}" for name in choice if name != "type"]
    return kind == "auto"


def _shows_reasoning(thinking: Any, ignored: list[str]) -> bool:
    """Whether the policy reasons is the run's; the field decides whether the answer shows it."""
    if thinking is None:
        return False
    if not isinstance(thinking, dict) or not isinstance(thinking.get("type"), str):
        refuse(f"thinking is {brief(thinking)}, and must be an object with a type")
    ignored += [f"thinking.{name}" for name in thinking if name != "type"]
    return bool(thinking["type"] != "disabled")


def _message_head(reply: ChatReply, model: str) -> dict[str, Any]:
    return {"id": f"msg_{reply.turn}", "type": "message", "role": "assistant", "model": model}


def _blocks(reply: ChatReply, show_reasoning: bool) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.reasoning and show_reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
    if reply.content:
        blocks.append({"type": "text", "text": reply.content})
    blocks += [{"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
               for call in reply.tool_calls]
    return blocks


def _deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(a block as its start shows it, the deltas that complete it)."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
    if block["type"] == "thinking":
        thoughts = [{"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"])]
        return {**block, "thinking": ""}, [*thoughts, {"type": "signature_delta", "signature": block["signature"]}]
    written = call_arguments(block["input"])
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": piece} for piece in pieces(written)]


def _stop_reason(reply: ChatReply) -> str:
    if reply.finish_reason == "stop" and reply.stopped_by is not None:
        return "stop_sequence"
    return STOP_REASONS[reply.finish_reason]


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()
