"""Requests to a resources server of NeMo-Gym: what tests send to a real one, and a server that answers what it did.

`nemo_gym_answers.json` holds what nemo-gym 0.4.0 answered (`configs/examples/adapters/nemo_gym_server.py`).
`tests/slow/test_nemo_gym_server.py` starts that server, asserts that it answers so still, and with
NEMO_GYM_ANSWERS=write writes the file anew.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

ANSWERS = Path(__file__).with_name("nemo_gym_answers.json")


def _function(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "description": f"{name} an item", "strict": True, "parameters": {
        "type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"],
        "additionalProperties": False}}


ROW = {"responses_create_params": {"input": [{"role": "developer", "content": "Be brief."},
                                             {"role": "user", "content": "Buy tea."}],
                                   "tools": [_function("look_up"), _function("buy")]},
       "item": "tea"}
OUTPUT = [
    {"type": "function_call", "call_id": "0", "name": "look_up", "arguments": '{"item": "tea"}'},
    {"type": "function_call_output", "call_id": "0", "output": '{"euros":3}'},
    {"type": "message", "id": "message_2", "role": "assistant", "status": "completed",
     "content": [{"type": "output_text", "text": "Done.", "annotations": []}]},
]
RESPONSE = {"id": "resp_0", "created_at": 0, "model": "policy", "object": "response", "output": OUTPUT,
            "parallel_tool_calls": True, "tool_choice": "auto", "tools": ROW["responses_create_params"]["tools"]}
SENT = [
    ("/seed_session", ROW), ("/look_up", {"item": "tea"}), ("/look_up", {"thing": "tea"}), ("/buy", {"item": "tea"}),
    ("/verify", {**ROW, "response": RESPONSE}), ("/seed_session", {"item": 3}),
]
"""(path, body) of the requests of one session, in this order."""


def talk(url: str) -> list[Any]:
    """(status, body) of what a server answers to `SENT`; of /verify, which repeats its request, the reward alone."""
    found = []
    with httpx.Client(base_url=url, trust_env=False) as client:
        for path, body in SENT:
            answer = client.post(path, json=body)
            given = answer.json()
            found.append([answer.status_code, {"reward": given["reward"]} if path == "/verify" else given])
    return found


class Replayed:
    """A server that answers what a real one did, whatever comes before. It keeps what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any, str]] = []
        """(path, body, cookie)."""
        self.authorizations: list[str | None] = []
        self.delay_s = 0.0
        """Time that it takes for each answer."""
        self._answers = {(path, json.dumps(body)): answer for (path, body), answer in
                         zip(SENT, json.loads(ANSWERS.read_text())["answers"], strict=True)}
        self._sessions = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Its URL, while it runs."""
        replayed = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                """Be silent."""

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                replayed.asked.append((self.path, body, self.headers.get("Cookie", "")))
                replayed.authorizations.append(self.headers.get("Authorization"))
                time.sleep(replayed.delay_s)
                status, answer = replayed.answer(self.path, body)
                text = json.dumps(answer, separators=(",", ":")).encode()
                self.send_response(status)
                if self.path == "/seed_session":
                    replayed._sessions += 1
                    self.send_header("Set-Cookie", f"session={replayed._sessions}; path=/; httponly")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}"
            finally:
                server.shutdown()
                thread.join()

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and body. What the server does not read of /seed_session and /verify may be different."""
        if path == "/verify":
            body = SENT[4][1]
        elif path == "/seed_session" and body.get("item") == ROW["item"]:
            body = ROW
        return tuple(self._answers.get((path, json.dumps(body)), (404, {"detail": "Not Found"})))
