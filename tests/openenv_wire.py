"""Messages of OpenEnv's WebSocket: what tests send to a real server, and a server that answers what a real one did.

`openenv_frames.json` holds what openenv 0.10.0 answered. `tests/slow/test_openenv_server.py` starts the real servers
(`configs/examples/adapters/openenv_server.py`, `tests/openenv_server.py`), asserts that they answer so still, and with
OPENENV_FRAMES=write writes the file anew.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.client import connect
from websockets.sync.server import ServerConnection, serve

FRAMES = Path(__file__).with_name("openenv_frames.json")
LIST = {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}}


def _step(**action: Any) -> dict[str, Any]:
    return {"type": "step", "data": action}


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return _step(type="call_tool", tool_name=name, arguments=arguments)


def _reset(**columns: Any) -> dict[str, Any]:
    return {"type": "reset", "data": columns}


SENT = {
    "guess": [
        LIST, _reset(prompt="Play.", highest=5, seed=3, episode_id="e"), _step(message="I guess."), _step(message="5"),
        _step(message="2"), _step(messages="2"), _reset(prompt="Play.", highest="a", seed=3, episode_id="e"),
        _reset(prompt="Play.", seed=3, episode_id="e"),
    ],
    "shop": [
        LIST, _reset(prompt="Play.", item="rice", seed=3, episode_id="e"), _call("look_up", item="rice"),
        _call("look_up", item="gold"), _call("look_up"), _call("nope"), _call("buy", item="rice"),
        _call("buy", item="tea", count=2),
    ],
}
"""By server, the messages of one session in this order."""


def talk(port: int, sent: list[dict[str, Any]]) -> list[Any]:
    """What a server at a port of this machine answers to these messages in one session."""
    with connect(f"ws://127.0.0.1:{port}/ws", proxy=None) as connection:
        answers = []
        for message in sent:
            with contextlib.suppress(ConnectionClosed):
                connection.send(json.dumps(message))
            answers.append(json.loads(connection.recv(timeout=30)))
        return answers


class Replayed:
    """A server that answers as a real one did: the same message by the same answer, whatever the session. It has as
    many sessions as the real one, and refuses others as that does."""

    def __init__(self, name: str, sessions: int = 2) -> None:
        recorded = json.loads(FRAMES.read_text())
        self._answers = {_key(sent): answer for sent, answer in
                         zip(SENT[name], recorded["answers"][name], strict=True)}
        self._refusal = recorded["refusal"]
        self.schema: Any = recorded["schema"][name]
        """What GET /schema answers."""
        self._free = threading.Semaphore(sessions)
        self.open = 0
        """Sessions that are in use."""
        self.most = 0
        """Of them at a time."""
        self.unknown: list[Any] = []
        """Messages that nobody has recorded."""
        self.headers: list[Headers] = []
        """Of the connections."""
        self.leave = threading.Event()
        """Answer no step any more, and close the connection in place of it."""

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Its URL, while it runs."""
        with serve(self._session, "127.0.0.1", 0, process_request=self._page) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
            finally:
                server.shutdown()
                thread.join()

    def _page(self, connection: ServerConnection, request: Request) -> Response | None:
        self.headers.append(request.headers)
        if request.path == "/ws":
            return None
        body = json.dumps(self.schema).encode()
        return Response(HTTPStatus.OK, "OK", Headers({"Content-Length": str(len(body))}), body)

    def _session(self, connection: ServerConnection) -> None:
        if not self._free.acquire(blocking=False):
            connection.send(json.dumps(self._refusal))
            return
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            for text in connection:
                message = json.loads(text)
                if message["type"] == "close" or (message["type"] == "step" and self.leave.is_set()):
                    return
                if _key(message) not in self._answers:
                    self.unknown.append(message)
                    return
                connection.send(json.dumps(self._answers[_key(message)]))
        finally:
            self.open -= 1
            self._free.release()


def _key(message: dict[str, Any]) -> str:
    """A message without the name that the client gives to the episode."""
    data = {name: value for name, value in message.get("data", {}).items() if name != "episode_id"}
    return json.dumps({**message, "data": data}, sort_keys=True)
