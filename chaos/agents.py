"""The agents of the runs with agents: a function that asks by urllib, one that asks by the stock `openai` client and
has a server of its own for its world, and this file as a program. They log for the witness what the policy answered,
mark what it reads, and fail once each time they are ordered to (`chaos.environments`).

A turn that calls the tool is answered by the tool, and continues the segment; any other is answered by the user, which
begins one. `turns` of the row says after how many turns an agent is done.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from chaos import environments
from chaos.environments import Played, tool_call
from chaos.reward_function import LONG_S
from chaos.witness.markers import Mark, legible

CONNECTIONS, LARGE, HALF_OPEN, RESET_CONNECTION = GOES_ON = ("connections", "large", "half_open", "reset_connection")
"""Orders to an agent that goes on afterwards: it opens hundreds of connections at once, sends a body that is too large,
leaves requests half sent, or leaves before its answer comes, and asks for it again."""
LEAK_SESSION, LEAK_AFTER_RETURN, ENDLESS, KILL_HOST, KILL_SERVER = (
    "leak_session", "leak_after_return", "endless", "kill_host", "kill_server")
"""Orders: it leaves behind a process and a thread that go on asking, and fails; it returns, and leaves a thread behind;
it asks until it is refused, and kills itself; it kills the process that has started it; the server of its world."""
CONNECTIONS_AT_ONCE, HALF_OPEN_AT_ONCE, LARGE_BYTES = 300, 40, 33 * 2**20
LEAKS_S, LEAKS_EVERY_S = 8.0, 0.05
LEAST_REFUSED = 5
"""What leaks goes on until so many of its requests are refused, at least."""
READ_S, RETRY_S = 0.005, 0.5
"""Time until a request has been read, and until it is sent again, as the stock clients do."""
ASK_S = 120.0
"""Longest wait for the policy."""
REFUSED = (401, 403, 404, 410)
LEAKED = "leaked"
"""Event of the journals: a request that was left behind was answered with this status."""
TOOL = {"type": "function", "function": {
    "name": "put", "description": "Add a number.", "parameters": {
        "type": "object", "properties": {"n": {"type": "integer", "description": "The number."}}, "required": ["n"]}}}


class AgentPlayed(Played):
    """One attempt at an episode by an agent."""

    def __init__(self, environment: str, row: dict[str, Any], session: Any) -> None:
        super().__init__(environment, row["number"], session.seed, row.get("held_out", False))
        self.session, self.turns = session, row["turns"]
        self.name = session.anthropic_url.rpartition("/")[2]
        """Of the session."""
        self.random = random.Random(session.seed)
        self.server: subprocess.Popen[str] | None = None
        """Of its world."""
        self.messages = [{"role": "user", "content": f"{self.random.randrange(100)} {self.mark}"}]
        self.begun = time.time()
        self._after_return = False
        self._leaves: list[Any] = []
        """Connections that it leaves open."""

    def body(self) -> dict[str, Any]:
        """Its next request."""
        return {"model": self.session.model, "messages": self.messages, "tools": [TOOL]}

    def heard(self, message: dict[str, Any]) -> bool:
        """The policy has answered: log it, fail if that is ordered, and answer it. Returns whether it is done.

        Args:
            message: of the answer, as OpenAI's API has it.
        """
        calls = message.get("tool_calls") or []
        text = legible(f"{message.get('reasoning_content') or ''}{message.get('content') or ''}" + "".join(
            tool_call(json.loads(call["function"]["arguments"]).get("n")) for call in calls))
        self._note("received", mark=list(self.mark), text=text)
        self.messages.append({name: message[name] for name in ("role", "content", "reasoning_content", "tool_calls")
                              if message.get(name)} | {"content": message.get("content") or ""})
        self.write(text)
        role = "tool" if calls else "user"
        done = self.mark.turn >= self.turns
        content = f"{len(text)} {self.random.randrange(100)} {self.mark}" if self.server is None else self._asked(text)
        self.answered(done, role)
        answers = [{"role": role, "content": content}]
        if calls:  # each has its answer; the last has the mark
            answers = [{"role": role, "content": content, "tool_call_id": call["id"]} for call in calls[-1:]]
            answers = [*({"role": role, "content": "0", "tool_call_id": call["id"]} for call in calls[:-1]), *answers]
        self.messages += answers
        return done

    def returned(self) -> float:
        """It is done; its reward."""
        self._after_return = True
        self._obey(self.mark)
        self._note("returned")
        if self.server is not None:
            self.server.kill()
            self.server.wait()
        return (self.mark.turn + len(self.messages[-2]["content"]) % 7) / 8

    def serve(self) -> None:
        """Start the server of its world."""
        self.server = subprocess.Popen([sys.executable, "-S", "-c", SERVER], stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE, text=True)

    def _asked(self, text: str) -> str:
        """How the server answers."""
        assert self.server is not None and self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.write(f"{len(text)} {self.random.randrange(100)}\n")
        self.server.stdin.flush()
        answer = self.server.stdout.readline().strip()
        if not answer:
            raise ConnectionError("the server of its world does not answer")
        return f"{answer} {self.mark}"

    # Failures

    def _note(self, event: str, **fields: Any) -> None:
        super()._note(event, session=self.name, **fields)

    def _fits(self, failure: str, after: Mark | None) -> bool:
        if self._after_return:
            return failure == LEAK_AFTER_RETURN
        if failure == LEAK_AFTER_RETURN or (failure in GOES_ON and after is not None and after.turn >= self.turns):
            return False
        return super()._fits(failure, after)

    def _unrecovered(self, failure: str, where: Mark) -> dict[str, Any]:
        if failure == LEAK_AFTER_RETURN:
            return {"refused": self.name}
        if failure in GOES_ON:
            return {"mark": [where.row, where.seed, where.turn + 1], "session": self.name}
        return {**super()._unrecovered(failure, where), "failed": self.name}

    def _shows_recovery(self, given: dict[str, Any]) -> bool:
        if "gateway_of" in given:  # see `chaos.gateway_failures`
            return self.mark.turn > 0 and self.begun > given["time"] and (
                environments._runner() == given["gateway_of"] or not Path(f"/proc/{given['gateway_of']}").exists())
        mine = given.get("session") in (None, self.name) and given.get("failed") != self.name
        return mine and super()._shows_recovery(given)

    def _fail(self, failure: str) -> None:
        mine = {CONNECTIONS: self._connections, LARGE: self._large, HALF_OPEN: self._half_open,
                RESET_CONNECTION: self._reset_connection, LEAK_SESSION: self._leak_session,
                LEAK_AFTER_RETURN: self._leak_thread, ENDLESS: self._endless, KILL_HOST: self._kill_host,
                KILL_SERVER: self._kill_server}
        mine.get(failure, partial(super()._fail, failure))()

    def _connections(self) -> None:
        """Open hundreds of connections, each with a request, and read no answer."""
        for _ in range(CONNECTIONS_AT_ONCE):
            with suppress(OSError):
                self._leaves.append(self._connected())
                self._leaves[-1].sendall(self._head("GET", "models", 0))

    def _large(self) -> None:
        """Send a body that is too large."""
        with suppress(OSError), self._connected() as connection:
            connection.sendall(self._head("POST", "chat/completions", LARGE_BYTES))
            for _ in range(LARGE_BYTES >> 20):
                connection.sendall(b" " * 2**20)
            status = connection.recv(100).split(b" ")[1:2]
            if status != [b"413"]:
                raise RuntimeError(f"a body of {LARGE_BYTES} bytes was answered {status}")

    def _half_open(self) -> None:
        """Leave requests half sent."""
        for number in range(HALF_OPEN_AT_ONCE):
            with suppress(OSError):
                self._leaves.append(self._connected())
                head = self._head("POST", "chat/completions", 1000)
                self._leaves[-1].sendall(head if number % 2 else head[:-7])

    def _reset_connection(self) -> None:
        """Let the next request be sent twice: the connection of the first is reset before its answer is there."""
        self._reset_next = True

    _reset_next = False

    def before_asking(self) -> None:
        """Called before each request."""
        if not self._reset_next:
            return
        self._reset_next = False
        body = json.dumps(self.body()).encode()
        with self._connected() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(self._head("POST", "chat/completions", len(body)) + body)
            time.sleep(READ_S)
        time.sleep(RETRY_S)

    def _leak_session(self) -> None:
        """Leave a process and a thread that go on asking, and fail."""
        given = {"url": self.session.base_url, "key": self.session.api_key, "body": self.body(), "name": self.name}
        subprocess.Popen([sys.executable, __file__, "leak", json.dumps(given)], start_new_session=True)
        threading.Thread(target=leak, args=(given,), daemon=True).start()
        raise RuntimeError("it leaks its session")

    def _leak_thread(self) -> None:
        """Leave a thread that goes on asking once the session is closed."""
        given = {"url": self.session.base_url, "key": self.session.api_key, "body": self.body(), "name": self.name,
                 "when_closed": True}
        place = Path(os.environ[environments.VARIABLE])
        threading.Thread(target=leak, args=(given, place), daemon=True).start()

    def _endless(self) -> None:
        """Ask for turns in other conversations until the episode has no more, and die."""
        status, number = 200, 0
        while status == 200:
            number += 1
            aside = {**self.body(), "messages": [{"role": "user", "content": f"aside {number}"}]}
            status, _ = request(self.session.base_url, self.session.api_key, aside)
        os.kill(os.getpid(), signal.SIGKILL)

    def _kill_host(self) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(LONG_S)

    def _kill_server(self) -> None:
        assert self.server is not None
        self.server.kill()

    def _connected(self) -> socket.socket:
        url = urlsplit(self.session.base_url)
        return socket.create_connection((url.hostname or "", url.port or 0), timeout=10)

    def _head(self, method: str, route: str, length: int) -> bytes:
        url = urlsplit(self.session.base_url)
        lines = (f"{method} {url.path}/{route} HTTP/1.1", f"Host: {url.netloc}",
                 f"Authorization: Bearer {self.session.api_key}", "Content-Type: application/json",
                 f"Content-Length: {length}", "", "")
        return "\r\n".join(lines).encode()


SERVER = "import sys\nfor line in iter(sys.stdin.readline, ''):\n    print(line.strip(), flush=True)\n"
"""The server of an agent's world."""


def request(url: str, key: str, body: dict[str, Any] | None, timeout_s: float = ASK_S) -> tuple[int, dict[str, Any]]:
    """(status, answer) of a request for a turn; without a body for the models. Raises OSError: there is no answer."""
    route = "models" if body is None else "chat/completions"
    asked = urllib.request.Request(f"{url}/{route}", data=None if body is None else json.dumps(body).encode(), headers={
        "Authorization": f"Bearer {key}", "Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=timeout_s) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, {}


def leak(given: dict[str, Any], injections: Path | None = None) -> None:
    """Go on asking at a URL for some seconds, and log how that is answered.

    Args:
        given: url, key, body; name of the session; `when_closed`: begin when the session is closed.
        injections: log there that the fault was survived, when enough requests were refused.
    """
    journal = environments._journal(os.environ[environments.JOURNALS], os.getpid())
    until, refused = time.monotonic() + LEAKS_S, 0
    while given.get("when_closed") and time.monotonic() < until:
        with suppress(OSError):
            if request(given["url"], given["key"], None)[0] != 200:
                break
        time.sleep(LEAKS_EVERY_S)
    while time.monotonic() < until or refused < LEAST_REFUSED:
        status = 0
        with suppress(OSError):
            status, _ = request(given["url"], given["key"], given["body"])
        journal.add(LEAKED, session=given["name"], status=status)
        refused += status in REFUSED
        if injections is not None and refused >= LEAST_REFUSED:
            _recovered(injections, given["name"])
            return
        if not status and time.monotonic() > until:
            return  # the gateway is gone
        time.sleep(LEAKS_EVERY_S)


def _recovered(injections: Path, session: str) -> None:
    file = environments._unrecovered_file(injections)
    failed = json.loads(environments._read(file) or "{}")
    if failed.get("refused") == session and environments._take(file) is not None:
        environments._log(injections, "recovered", fault=failed["fault"])


# The agents


def asker(row: dict[str, Any], session: Any) -> float:
    """An agent that asks by urllib."""
    return _asked_by_urllib(AgentPlayed("asker", row, session))


def _asked_by_urllib(played: AgentPlayed) -> float:
    played.begin()
    done = False
    while not done:
        played.before_asking()
        status, answer = request(played.session.base_url, played.session.api_key, played.body())
        if status != 200:
            raise RuntimeError(f"it was refused with status {status}")
        done = played.heard(answer["choices"][0]["message"])
    return played.returned()


async def client(row: dict[str, Any], session: Any) -> float:
    """An agent that asks by the stock client, whose world is a server."""
    from openai import AsyncOpenAI

    played = AgentPlayed("client", row, session)
    played.serve()
    played.begin()
    done = False
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as openai:
        while not done:
            played.before_asking()
            answer = await openai.chat.completions.create(**played.body())
            done = played.heard(answer.choices[0].message.model_dump(exclude_none=True))
    return played.returned()


def program() -> None:
    """This file as the program of an agent: it leaves its reward in a file."""
    from rlhf_ray.environments.protocol import AgentSession

    variables = os.environ
    row = json.loads(Path(variables["RLHF_RAY_ROW"]).read_text())
    session = AgentSession(variables["OPENAI_BASE_URL"], variables["ANTHROPIC_BASE_URL"], variables["OPENAI_API_KEY"],
                           variables["RLHF_RAY_MODEL"], int(variables["RLHF_RAY_SEED"]), 0, 0)
    reward = _asked_by_urllib(AgentPlayed("program", row, session))
    Path("reward.txt").write_text(str(reward))


if __name__ == "__main__":
    if sys.argv[1:2] == ["leak"]:
        leak(json.loads(sys.argv[2]))
    else:
        program()
