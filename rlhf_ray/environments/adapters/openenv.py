"""Servers of OpenEnv (github.com/huggingface/OpenEnv): one WebSocket is one session, and one session is one episode.

The messages are those of openenv 0.10.0 (`openenv/core/env_server/types.py` and `http_server.py`, endpoint `/ws`):
{"type": "reset" | "step", "data": {...}} is answered by {"type": "observation", "data": {"observation", "reward",
"done", "metadata"}} or {"type": "error", "data": {"message", "code", ...}}; {"type": "mcp"} carries a request of the
Model Context Protocol, and {"type": "close"} frees the session.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

import httpx
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import ClientConnection, connect

from rlhf_ray.environments.adapters.function_schemas import function_schema
from rlhf_ray.environments.adapters.servers import OPEN_S, is_local, token_headers
from rlhf_ray.environments.answers import ANSWER_BYTES
from rlhf_ray.environments.protocol import Reply, Start, Step

AGAIN_S = 0.2
"""Time between two tries for a session while all are in use."""
CLOSE_S = 2.0
"""Longest time for the server's part of closing: the session is freed when the connection ends in any case."""
FENCE = re.compile(r"^```\w*\n(.*)\n```$", re.DOTALL)

Action = Literal["text", "json", "tools"]


class ServerError(Exception):
    """The server has answered with an error; `code` is its name of the kind of it."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.code = str(data.get("code"))
        details = [f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg')}" for each in data.get("errors", ())]
        super().__init__("; ".join([str(data.get("message")), *details]))


def make(settings: dict[str, Any]) -> type:
    """An environment in messages, for `OpenEnvSource` as JSON."""
    return type("OpenEnvServer", (OpenEnvSession,), {"settings": settings, "replayable": settings["replayable"]})


class OpenEnvSession:
    """One episode with a server. Blocking calls: a thread of the connection answers the server's pings while the policy
    writes, which no event loop would do that runs during calls only."""

    settings: ClassVar[dict[str, Any]] = {}
    schema: ClassVar[dict[str, Any]] = {}
    """Of the server's actions, once it is known."""

    def __init__(self) -> None:
        self._connection: ClientConnection | None = None
        self._action: Action = "json"
        self._field = ""

    def reset(self, row: dict[str, Any], seed: int) -> Start:
        """Begin a session, and reset it.

        Raises:
            ConnectionError: the server cannot be reached, or all its sessions are in use.
            ServerError: it fails.
        """
        tools = self._connect()
        self._choose_action(tools)
        names = row if self.settings["columns"] is None else self.settings["columns"]
        if missing := [name for name in names if name not in row]:
            raise ValueError(f"the row has no column {missing[0]!r}, which openenv.columns names; its columns are "
                             f"{', '.join(row)}")
        given = {name: row[name] for name in names}
        answer = self._ask("reset", {**given, "seed": seed, "episode_id": uuid.uuid4().hex})
        if answer["done"]:
            raise ValueError("the episode is done after its reset")
        text = self._shown(answer)
        return Start(tools=tools if self._action == "tools" else [], observation=f"\n\n{text}" if text else "")

    def step(self, reply: Reply) -> Step:
        """The server's answer to a reply of the policy; to each of its calls in turn, where it calls tools.

        Raises:
            ConnectionError: the connection is lost.
            ServerError: the environment fails.
        """
        if self._action == "tools":
            return self._calls(reply)
        action: Any = {self._field: reply.content}
        if self._action == "json":
            try:
                fence = FENCE.match(reply.content.strip())
                action = json.loads(fence[1] if fence else reply.content)
                if not isinstance(action, dict):
                    raise ValueError("it is no object")
            except (ValueError, RecursionError) as error:
                return _wrong(f"the action must be one JSON object, and nothing else: {error}")
        try:
            answer = self._ask("step", action)
        except ServerError as error:
            if error.code != "VALIDATION_ERROR":
                raise
            return _wrong(str(error))
        step = _scored(answer)
        step.messages = [{"role": "user", "content": self._shown(answer) or "{}"}]
        return step

    def _calls(self, reply: Reply) -> Step:
        total = Step(done=not reply.tool_calls)
        for call in reply.tool_calls:
            action = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
            answer = self._ask("step", action)
            step = _scored(answer)
            content = _tool_text(answer["observation"])
            total.messages.append({"role": "tool", "name": call.name, "tool_call_id": call.id, "content": content})
            total.tool_errors += _tool_failed(answer["observation"])
            total.reward += step.reward
            total.info.update(step.info)
            total.done = step.done
            if step.done:
                break
        return total

    def close(self) -> None:
        """Free the session."""
        if self._connection is not None:
            with suppress(WebSocketException, OSError):
                self._connection.send(json.dumps({"type": "close"}))
            self._connection.close()
            self._connection = None

    def _connect(self) -> list[dict[str, Any]]:
        """Take a session as soon as one is free; the tools that it lists, as far as they act."""
        deadline = time.monotonic() + self.settings["connect_s"]
        while True:
            self._open()
            try:
                return self._tools()
            except ServerError as error:
                self.close()
                if error.code != "CAPACITY_REACHED":
                    raise
                if time.monotonic() > deadline:
                    raise ConnectionError(
                        f"all sessions of the server were in use for {self.settings['connect_s']:g} s: {error}. Raise "
                        "its max_concurrent_envs, or lower concurrency of the environment") from None
            time.sleep(AGAIN_S)

    def _open(self) -> None:
        parts = urlsplit(self.settings["url"])
        scheme = {"http": "ws", "https": "wss"}[parts.scheme]
        address = f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}/ws"
        try:
            self._connection = connect(
                address, additional_headers=token_headers(self.settings), open_timeout=OPEN_S, close_timeout=CLOSE_S,
                max_size=ANSWER_BYTES, ping_timeout=None, proxy=None if is_local(address) else True)
        except (OSError, WebSocketException) as error:
            raise ConnectionError(f"there is no OpenEnv server at {self.settings['url']}: {error}") from None

    def _tools(self) -> list[dict[str, Any]]:
        """What the server lists, or nothing. It is asked in any case: the answer says whether there is a session."""
        request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        answer = self._ask("mcp", request)
        listed = (answer.get("result") or {}).get("tools", [])
        return [function_schema(tool["name"], tool.get("description") or "",
                                tool.get("inputSchema") or tool.get("input_schema") or {}) for tool in listed]

    def _choose_action(self, tools: list[dict[str, Any]]) -> None:
        """What a reply becomes.

        Raises:
            ValueError: the server's actions are not of this kind.
        """
        wanted, self._field = self.settings["action"], self.settings["field"] or ""
        if wanted == "tools" and not tools:
            raise ValueError("openenv.action is tools, and the server lists none; leave it out")
        if wanted == "tools" or (wanted == "auto" and tools and not self._field):
            self._action = "tools"
        elif wanted == "json" or (wanted == "text" and self._field):
            self._action = wanted
        else:
            self._action = "text" if self._field_is_known(required=wanted == "text") else "json"

    def _field_is_known(self, *, required: bool) -> bool:
        """Whether an action is one text, by the server's schema."""
        schema = self._action_schema()
        if self._field:
            if self._field not in schema.get("properties", {}):
                raise ValueError(f"openenv.field={self._field} is no field of the server's actions, which have "
                                 f"{', '.join(schema.get('properties', {}))}")
            return True
        needed = schema.get("required", [])
        if len(needed) == 1 and schema.get("properties", {}).get(needed[0], {}).get("type") == "string":
            self._field = needed[0]
        elif required:
            raise ValueError("openenv.action is text, and the server's actions have not one field that is required, a "
                             f"text, but {', '.join(needed) or 'none'}; name one by openenv.field, or use action: json")
        return bool(self._field)

    def _action_schema(self) -> dict[str, Any]:
        kind = type(self)
        kind.schema = kind.schema or self._asked_schema()
        return kind.schema

    def _asked_schema(self) -> dict[str, Any]:
        url = f"{self.settings['url'].rstrip('/')}/schema"
        headers = token_headers(self.settings)
        try:
            with httpx.Client(headers=headers, timeout=OPEN_S, trust_env=not is_local(url)) as client:
                found = client.get(url).raise_for_status().json()["action"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise ConnectionError(f"{url} gives no schema of actions: {type(error).__name__}: {error}; name "
                                  "openenv.action, and openenv.field for a text") from None
        return dict(found)

    def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """The data of the answer to a message.

        Raises:
            ServerError: it is an error.
            ConnectionError: the connection is lost, or the answer is none.
        """
        assert self._connection is not None, "reset comes first"
        message = json.dumps({"type": kind, "data": data})
        try:
            with suppress(ConnectionClosed):  # a refused session is closed after its error, which is still to be read
                self._connection.send(message)
            answer = json.loads(self._connection.recv())
            if answer["type"] == "error":
                raise ServerError(answer["data"])
            found = dict(answer["data"])
            if answer["type"] == "observation":
                found = {"observation": dict(found["observation"]), "reward": found.get("reward"),
                         "done": bool(found.get("done")), "metadata": found.get("metadata") or {}}
            if answer["type"] != ("mcp" if kind == "mcp" else "observation"):
                raise ValueError(f"its type is {answer['type']!r}")
            return found
        except (ConnectionClosed, OSError) as error:
            raise ConnectionError(f"the OpenEnv server closed the connection during {kind}: {error}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise ConnectionError(f"the OpenEnv server's answer to {kind} is none: {type(error).__name__}: {error}"
                                  ) from None

    def _shown(self, answer: Mapping[str, Any]) -> str:
        """What the policy reads of an observation; "" if there is nothing in it."""
        observation = {name: value for name, value in answer["observation"].items() if name != "metadata"}
        if name := self.settings["observation"]:
            if name not in observation:
                raise ValueError(f"the observation has no field {name!r} (openenv.observation); its fields are "
                                 f"{', '.join(observation) or 'none'}")
            observation = {name: observation[name]}
        elif "tool_name" in observation and "result" in observation:
            return _tool_text(observation)
        if not observation:
            return ""
        only = next(iter(observation.values())) if len(observation) == 1 else None
        return only if isinstance(only, str) else json.dumps(observation, ensure_ascii=False)


def _scored(answer: Mapping[str, Any]) -> Step:
    reward = answer["reward"]
    return Step(reward=0.0 if reward is None else float(reward), done=answer["done"], info=dict(answer["metadata"]))


def _wrong(problem: str) -> Step:
    """The answer to a reply that is no action."""
    return Step(messages=[{"role": "user", "content": f"Error: {problem}"}], tool_errors=1)


def _tool_failed(observation: Mapping[str, Any]) -> bool:
    result = observation.get("result")
    return bool(observation.get("error")) or (isinstance(result, dict) and bool(result.get("is_error")))


def _tool_text(observation: Mapping[str, Any]) -> str:
    """The texts of a tool's result; its structured content, or the result itself, as JSON if there are none."""
    if error := observation.get("error"):
        return f"Error: {error.get('message') if isinstance(error, dict) else error}"
    result = observation.get("result")
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        texts = [part.get("text") if part.get("type") == "text" else f"[{part.get('mimeType') or part.get('type')}]"
                 for part in result["content"] if isinstance(part, dict)]
        if texts:
            return "\n".join(str(text) for text in texts)
        result = result.get("structured_content", result)
    if result is None:
        return ""
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
