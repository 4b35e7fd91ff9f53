"""Resources servers of NeMo-Gym (github.com/NVIDIA-NeMo/Gym), over HTTP: a session is a cookie.

The requests are those of its `responses_api_agents/simple_agent/app.py` (0.4.0): POST /seed_session with the row, POST
/TOOL with the arguments of each call, whose answer the policy reads whatever its status, and at the end POST /verify
with the row and what the policy did, in the form of OpenAI's Responses API.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import httpx

from rlhf_ray.environments.adapters.function_schemas import function_schema
from rlhf_ray.environments.adapters.servers import OPEN_S, is_local, token_headers
from rlhf_ray.environments.protocol import Message, Reply, Start, Step, ToolCall

PARAMETERS = "responses_create_params"


def make(settings: dict[str, Any]) -> type:
    """An environment in messages, for `NemoGymSource` as JSON."""
    return type("NemoGymServer", (NemoGymSession,), {"settings": settings, "replayable": settings["replayable"]})


class NemoGymSession:
    """One episode with a server."""

    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        url = self.settings["url"].rstrip("/")
        self._http = httpx.Client(base_url=url, headers=token_headers(self.settings), trust_env=not is_local(url),
                                  timeout=httpx.Timeout(None, connect=OPEN_S))
        self._row: dict[str, Any] = {}
        self._names: list[str] = []
        self._output: list[dict[str, Any]] = []

    def reset(self, row: dict[str, Any], seed: int) -> Start:
        """Begin a session.

        Raises:
            ValueError: the row is none of NeMo-Gym's.
            ConnectionError, RuntimeError: the server cannot be reached, or refuses the row.
        """
        if not isinstance(row.get(PARAMETERS), Mapping):
            raise ValueError(f"the row has no column {PARAMETERS} with an object, as NeMo-Gym's data has; its columns "
                             f"are {', '.join(row)}")
        self._row = row
        parameters = row[PARAMETERS]
        tools = [_tool(each) for each in parameters.get("tools") or []]
        self._names = [tool["function"]["name"] for tool in tools]
        self._post("/seed_session", row)
        return Start(messages=_messages(parameters), tools=tools)

    def step(self, reply: Reply) -> Step:
        """What the tools answer to the calls of a reply; a reply without calls ends the episode.

        Raises:
            ConnectionError: the server cannot be reached.
        """
        if reply.reasoning:
            self._add("reasoning", summary=[{"type": "summary_text", "text": reply.reasoning}])
        if reply.content or not reply.tool_calls:
            written = [{"type": "output_text", "text": reply.content, "annotations": []}]
            self._add("message", role="assistant", status="completed", content=written)
        for call in reply.tool_calls:
            self._output.append({"type": "function_call", "call_id": call.id, "name": call.name,
                                 "arguments": json.dumps(call.arguments)})
        answers = [(call, *self._called(call)) for call in reply.tool_calls]
        for call, content, _ in answers:
            self._output.append({"type": "function_call_output", "call_id": call.id, "output": content})
        messages: list[Message] = [{"role": "tool", "name": call.name, "tool_call_id": call.id, "content": content}
                                   for call, content, _ in answers]
        return Step(messages=messages, done=not messages, tool_errors=sum(failed for *_, failed in answers))

    def get_reward(self) -> float:
        """The reward of `/verify`, asked when the episode has ended, in whatever way.

        Raises:
            ConnectionError, RuntimeError: the server cannot be reached, or refuses what it is sent.
            ValueError: its answer has no reward.
        """
        parameters = self._row[PARAMETERS]
        response = {"id": "resp_0", "created_at": 0, "model": "policy", "object": "response", "output": self._output,
                    "parallel_tool_calls": True, "tool_choice": "auto", "tools": parameters.get("tools") or []}
        answer = self._post("/verify", {**self._row, "response": response})
        reward = answer.get("reward") if isinstance(answer, dict) else None
        if not isinstance(reward, int | float):
            raise ValueError(f"/verify gave no reward, but {str(answer)[:200]}")
        return float(reward)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _add(self, kind: str, **fields: Any) -> None:
        self._output.append({"type": kind, "id": f"{kind}_{len(self._output)}", **fields})

    def _called(self, call: ToolCall) -> tuple[str, bool]:
        """What the policy reads, and whether it is an error."""
        if call.name not in self._names:
            return f"Error: there is no tool {call.name!r}; the tools are {', '.join(self._names) or 'none'}", True
        limit = self.settings["timeout_s"]
        try:
            answer = self._http.post(f"/{call.name}", json=call.arguments, timeout=limit)
        except httpx.ReadTimeout:
            return f"Error: {call.name}: it gave no answer within {limit:g} s", True
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        return answer.text, answer.is_error

    def _post(self, path: str, body: Any) -> Any:
        try:
            answer = self._http.post(path, json=body)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if answer.is_error:
            raise RuntimeError(f"{path} answered {answer.status_code}: {answer.text[:500]}")
        return answer.json()

    def _unreachable(self, error: Exception) -> ConnectionError:
        where = self.settings["url"]
        return ConnectionError(f"there is no NeMo-Gym server at {where}: {type(error).__name__}: {error}")


def _tool(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("type") != "function" or "/" in str(given.get("name")):
        raise ValueError(f"the tool {str(given)[:200]} of {PARAMETERS} is no function")
    return function_schema(given["name"], given.get("description") or "", given.get("parameters") or {})


def _messages(parameters: Mapping[str, Any]) -> list[Message]:
    """What the policy reads first: `instructions`, and the messages of `input`.

    Raises:
        ValueError: it is something else, an image or an earlier call for example.
    """
    given = parameters.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    found: list[Message] = []
    if parameters.get("instructions"):
        found.append({"role": "system", "content": parameters["instructions"]})
    for item in given or []:
        content = item.get("content")
        if isinstance(content, list) and all("text" in part for part in content):
            content = "".join(part["text"] for part in content)
        if item.get("type", "message") != "message" or not isinstance(content, str):
            raise ValueError(f"{PARAMETERS}.input has {str(item)[:200]}, which is no message of text")
        found.append({"role": "system" if item["role"] == "developer" else item["role"], "content": content})
    return found
