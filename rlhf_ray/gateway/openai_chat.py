"""OpenAI's chat completions: a body read into a `ChatRequest`, and a `ChatReply` written as an answer, as a stream, or
an error. Plain JSON: https://platform.openai.com/docs/api-reference/chat; the order of a stream's chunks is that of
vLLM 0.32 (vllm/entrypoints/openai/chat_completion/serving.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_ray.environments.protocol import Message, ToolCall
from rlhf_ray.gateway.chat import ChatReply, ChatRequest
from rlhf_ray.gateway.fields import (
    OWN_TOKENS,
    TEXT_SEPARATOR,
    Asked,
    arguments_of,
    call_arguments,
    flag,
    function_tool,
    list_of_objects,
    pieces,
    refuse,
    sort_fields,
    stop_texts,
    text,
    token_limit,
)
from rlhf_ray.user_code.loading import brief

MOST_STOPS = 4
"""Texts in `stop`, as OpenAI documents it."""
OWN_PROMPT = "the prompt is what the model's chat template makes of messages and tools"

ACTS = frozenset({"model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "stream",
                  "stream_options"})
OVERRIDDEN = frozenset({
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "length_penalty", "best_of", "use_beam_search", "min_tokens", "ignore_eos", "stop_token_ids", "reasoning_effort",
    "verbosity", "thinking_token_budget", "chat_template_kwargs",
})
"""The sampling is the run's, and so are the settings of its chat template. Besides OpenAI's fields, those of vLLM,
which clients send as `extra_body`."""
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "a request is one turn of the episode; send n requests"),
    "logit_bias": (({},), OWN_TOKENS),
    "response_format": (({"type": "text"},), OWN_TOKENS + "; ask for the format in a message"),
    "modalities": ((["text"],), "the policy writes text"),
    "audio": ((), "the policy writes text"),
    "functions": (([],), "it is OpenAI's old field; send tools"),
    "function_call": (("auto", "none"), "it is OpenAI's old field; send tool_choice"),
    "web_search_options": ((), "there is no search; send a tool of your own"),
    "structured_outputs": ((), OWN_TOKENS),
    "guided_json": ((), OWN_TOKENS),
    "guided_regex": ((), OWN_TOKENS),
    "guided_choice": ((), OWN_TOKENS),
    "guided_grammar": ((), OWN_TOKENS),
    "allowed_token_ids": ((), OWN_TOKENS),
    "bad_words": (([],), OWN_TOKENS),
    "logits_processors": (([],), OWN_TOKENS),
    "chat_template": ((), OWN_PROMPT),
    "documents": (([],), OWN_PROMPT),
    "truncate_prompt_tokens": ((), OWN_PROMPT),
    "add_generation_prompt": ((True,), OWN_PROMPT),
    "continue_final_message": ((False,), "the policy begins its turns itself"),
    "echo": ((False,), "the answer is the policy's turn alone"),
}
MESSAGE_FIELDS: Mapping[str, frozenset[str]] = {
    "system": frozenset({"role", "content"}),
    "user": frozenset({"role", "content"}),
    "assistant": frozenset({"role", "content", "tool_calls", "reasoning_content", "reasoning"}),
    "tool": frozenset({"role", "content", "tool_call_id", "name"}),
}
ERRORS = {400: ("invalid_request_error", None), 401: ("invalid_request_error", "invalid_api_key"),
          404: ("invalid_request_error", "not_found"), 405: ("invalid_request_error", "method_not_allowed"),
          408: ("invalid_request_error", "timeout"), 410: ("invalid_request_error", "session_closed"),
          413: ("invalid_request_error", "too_large"), 429: ("rate_limit_error", "too_many_requests")}


def parse(body: Mapping[str, Any]) -> Asked:
    """The request in a body.

    Raises:
        Refused: status 400; names the field, its value and the reason.
    """
    overridden, ignored = sort_fields(body, ACTS, OVERRIDDEN, REFUSED)
    stream = flag(body.get("stream"), "stream")
    options = body.get("stream_options")
    if options is not None:
        if not stream or not isinstance(options, dict):
            refuse("stream_options must be an object, and comes with stream: true")
        ignored += [f"stream_options.{name}" for name in options if name != "include_usage"]
    limit = token_limit(body.get("max_completion_tokens"), "max_completion_tokens")
    older_limit = token_limit(body.get("max_tokens"), "max_tokens")
    tools = _tools(body.get("tools"), ignored)
    request = ChatRequest(
        messages=_messages(body.get("messages"), ignored),
        tools=tools if _may_call(body.get("tool_choice")) else [],
        max_tokens=limit if limit is not None else older_limit,
        stop=stop_texts(body.get("stop"), "stop", MOST_STOPS),
    )
    usage = flag((options or {}).get("include_usage"), "stream_options.include_usage")
    return Asked(request, stream, overridden, ignored, show_usage=usage)


def answer(reply: ChatReply, model: str, created: int) -> dict[str, Any]:
    """The body of a "chat.completion".

    Args:
        created: seconds since 1970.
    """
    message: dict[str, Any] = {"role": "assistant", "content": _content(reply), "refusal": None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [_call(call, call_arguments(call.arguments)) for call in reply.tool_calls]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish_reason}
    return {"id": _id(reply), "object": "chat.completion", "created": created, "model": model, "choices": [choice],
            "usage": _usage(reply)}


def stream(reply: ChatReply, model: str, created: int, show_usage: bool) -> Iterator[bytes]:
    """The events of a finished turn: the role, reasoning, content, each tool call, the reason why it ended, the usage
    if asked for, and "[DONE]"."""
    head = {"id": _id(reply), "object": "chat.completion.chunk", "created": created, "model": model}
    if show_usage:
        head["usage"] = None

    def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return _event(json.dumps({**head, "choices": [choice]}))

    yield chunk({"role": "assistant", "content": _content(reply) and ""})
    for piece in pieces(reply.reasoning):
        yield chunk({"reasoning_content": piece})
    for piece in pieces(reply.content):
        yield chunk({"content": piece})
    for index, call in enumerate(reply.tool_calls):
        yield chunk({"tool_calls": [{"index": index, **_call(call, "")}]})
        for piece in pieces(call_arguments(call.arguments)):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    yield chunk({}, reply.finish_reason)
    if show_usage:
        yield _event(json.dumps({**head, "choices": [], "usage": _usage(reply)}))
    yield _event("[DONE]")


def error(status: int, message: str) -> dict[str, Any]:
    """The body of an error."""
    kind, code = ERRORS.get(status, ("server_error" if status >= 500 else "invalid_request_error", None))
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def model(name: str, created: int) -> dict[str, Any]:
    """The body about a model."""
    return {"id": name, "object": "model", "created": created, "owned_by": "rlhf-ray"}


def models(name: str, created: int) -> dict[str, Any]:
    """The body of the list of models."""
    return {"object": "list", "data": [model(name, created)]}


def _messages(given: Any, ignored: list[str]) -> list[Message]:
    messages = list_of_objects(given, "messages")
    if not messages:
        refuse("messages is empty; a conversation has at least one")
    return [_message(message, f"messages[{place}]", ignored) for place, message in enumerate(messages)]


def _message(given: dict[str, Any], where: str, ignored: list[str]) -> Message:
    role = given.get("role")
    if role == "developer":
        role = "system"
    if not isinstance(role, str) or role not in MESSAGE_FIELDS:
        refuse(f"{where}.role is {brief(role)}, and must be system, developer, user, assistant or tool")
    for field in ("function_call", "audio", "refusal"):
        if given.get(field) is not None:
            refuse(f"{where}.{field} is refused: messages are text and calls of tools")
    ignored += [f"messages[].{name}" for name, value in given.items()
                if value is not None and name not in MESSAGE_FIELDS[role]]
    message: Message = {"role": role, "content": _text_of(given.get("content"), where)}
    if role == "tool":
        message["tool_call_id"] = text(given.get("tool_call_id"), f"{where}.tool_call_id")
        if given.get("name") is not None:
            message["name"] = text(given["name"], f"{where}.name")
    elif role == "assistant":
        reasoning = given.get("reasoning_content")
        reasoning = reasoning if reasoning is not None else given.get("reasoning")
        if reasoning:
            message["reasoning_content"] = text(reasoning, f"{where}.reasoning_content")
        if given.get("tool_calls"):
            calls = list_of_objects(given["tool_calls"], f"{where}.tool_calls")
            message["tool_calls"] = [_made_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return message


def _text_of(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return text(content, f"{where}.content")
    parts = []
    for place, part in enumerate(list_of_objects(content, f"{where}.content")):
        if part.get("type") != "text":
            refuse(f"{where}.content[{place}] has the type {brief(part.get('type'))}; the policy reads parts of the "
                   "type 'text' only")
        parts.append(text(part.get("text"), f"{where}.content[{place}].text"))
    return TEXT_SEPARATOR.join(parts)


def _made_call(given: dict[str, Any], where: str) -> dict[str, Any]:
    function = given.get("function")
    if given.get("type", "function") != "function" or not isinstance(function, dict):
        refuse(f"{where} must have the type 'function', and `function` with name and arguments")
    arguments = text(function.get("arguments"), f"{where}.function.arguments")
    return {"id": text(given.get("id"), f"{where}.id"), "type": "function",
            "function": {"name": text(function.get("name"), f"{where}.function.name"),
                         "arguments": arguments_of(arguments, f"{where}.function.arguments")}}


def _tools(given: Any, ignored: list[str]) -> list[dict[str, Any]]:
    if given is None:
        return []
    tools = []
    for place, tool in enumerate(list_of_objects(given, "tools")):
        where, function = f"tools[{place}]", tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            refuse(f"{where} has the type {brief(tool.get('type'))}; the policy calls tools of the type 'function'")
        ignored += [f"tools[].{name}" for name in tool if name not in ("type", "function")]
        if "strict" in function:
            ignored.append("tools[].function.strict")
        shown = {name: value for name, value in function.items() if name != "strict"}
        tools.append(function_tool(shown, f"{where}.function"))
    return tools


def _may_call(choice: Any) -> bool:
    if choice not in (None, "auto", "none"):
        refuse(f"tool_choice={brief(choice)} is refused: {OWN_TOKENS}; send 'auto' or 'none'")
    return choice != "none"


def _content(reply: ChatReply) -> str | None:
    """Null beside calls without text, as OpenAI answers."""
    return reply.content if reply.content or not reply.tool_calls else None


def _call(call: ToolCall, arguments: str) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _id(reply: ChatReply) -> str:
    return f"chatcmpl-{reply.turn}"


def _usage(reply: ChatReply) -> dict[str, int]:
    return {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens,
            "total_tokens": reply.prompt_tokens + reply.completion_tokens}


def _event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()
