"""A small HTTP server that fails as it is told: one behaviour a request, from a list or drawn by a seed.

Its score of a sample is the number in the sample's prompt, so that a lost, doubled or swapped score is seen.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

DIGEST = "d1"
SLOW_S = 5.0


@dataclass
class Asked:
    """One request to /score."""

    behaviour: str
    headers: dict[str, str]
    samples: list[dict[str, Any]]
    at: float


@dataclass
class FaultServer:
    """What the server does and what it saw."""

    behaviours: Iterator[str]
    choose: Callable[[list[dict[str, Any]]], str] | None = None
    """In place of `behaviours`, where the behaviour hangs on the request's samples."""
    port: int = 0
    digest: str = DIGEST
    tokenizer: str = "t1"
    health: str = "ok"
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def seen(self) -> list[str]:
        """Behaviours in the order of the requests."""
        return [a.behaviour for a in self.asked]

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                method, path, headers, body = await _read(reader)
                if path.endswith("/health"):
                    content = json.dumps({"digest": self.digest, "tokenizer": self.tokenizer}).encode()
                    writer.write(_response(200, content) if self.health == "ok" else BEHAVIOURS[self.health]([], {}))
                else:
                    assert (method, path.rpartition("/")[2]) == ("POST", "score")
                    samples = json.loads(body)["samples"]
                    behaviour = self.choose(samples) if self.choose else next(self.behaviours, "ok")
                    self.asked.append(Asked(behaviour, headers, samples, time.monotonic()))
                    if not await self._behave(behaviour, samples, headers, writer):
                        break
                await writer.drain()
        writer.close()

    async def _behave(self, behaviour: str, samples: list[Any], headers: dict[str, str],
                      writer: asyncio.StreamWriter) -> bool:
        """Whether the connection goes on."""
        if behaviour == "slow":
            await asyncio.sleep(SLOW_S)
            behaviour = "ok"
        if behaviour == "reset":
            writer.transport.abort()
            return False
        if behaviour == "trickle":  # never silent for long, never done
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n")
            for _ in range(100):
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.05)
            return False
        writer.write(BEHAVIOURS[behaviour](samples, headers))
        return behaviour not in ("truncated", "hang_up")


def number(sample: dict[str, Any]) -> float:
    """The score of a sample."""
    return float(sample["tokens"][0] if "tokens" in sample else sample["prompt"].split()[-1])


def parity(sample: dict[str, Any]) -> float:
    """Another score of a sample, which depends on its response: whether the sum of its tokens is odd."""
    return float(sum(sample["tokens"]) % 2)


def _response(status: int, body: bytes, kind: str = "application/json", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _scores(*, change: Callable[[list[Any]], list[Any]] = lambda s: s, model: Any = DIGEST,
            score: Callable[[dict[str, Any]], float] = number, **headers: str) -> Callable[..., bytes]:
    def respond(samples: list[Any], _: dict[str, str]) -> bytes:
        answer = {"version": 1, "scores": change([score(s) for s in samples]), "model": model}
        return _response(200, json.dumps(answer).encode(), **headers)

    return respond


def _constant(data: bytes) -> Callable[..., bytes]:
    return lambda *_: data


BEHAVIOURS: dict[str, Callable[..., bytes]] = {
    "ok": _scores(),
    "parity": _scores(score=parity),
    "500": _constant(_response(500, b"<h1>Internal error</h1>", "text/html")),
    "429": _constant(_response(429, b'{"error": "full"}', Retry_After="1")),
    "503": _constant(_response(503, b'{"error": "stopping"}')),
    "503_date": _constant(_response(503, b"", Retry_After="Wed, 21 Oct 2015 07:28:00 GMT")),
    "408": _constant(_response(408, b"")),
    "400": _constant(_response(400, b'{"error": "no such sample"}')),
    "401": _constant(_response(401, b'{"error": "who are you"}')),
    "404": _constant(_response(404, b"nothing here", "text/plain")),
    "echo": lambda _, headers: _response(400, f"you sent {headers.get('authorization')}".encode()),
    "nan": _scores(change=lambda s: [float("nan"), *s[1:]]),
    "infinite": _scores(change=lambda s: [*s[:-1], float("inf")]),
    "beyond_float32": _scores(change=lambda s: [1e39, *s[1:]]),
    "largest": _scores(change=lambda s: [3e38] * len(s)),
    "too_few": _scores(change=lambda s: s[:-1]),
    "too_many": _scores(change=lambda s: [*s, 1.0]),
    "words": _scores(change=lambda s: ["good", *s[1:]]),
    "booleans": _scores(change=lambda s: [True, *s[1:]]),
    "null": _scores(change=lambda s: [None, *s[1:]]),
    "other_model": _scores(model="d2"),
    "gzip": _scores(Content_Encoding="gzip"),
    "bad_json": _constant(_response(200, b'{"scores": [1.0')),
    "nested": _constant(_response(200, b"[" * 20000)),
    "list": _constant(_response(200, b"[1.0]")),
    "newer": _constant(_response(200, b'{"version": 2, "scores": [1.0]}')),
    "html": _constant(_response(200, b"<p>welcome to the wifi</p>", "text/html")),
    "huge": lambda *_: _response(200, b"[" + b"1.0," * 500_000 + b"1.0]"),
    "redirect": _constant(_response(307, b"", Location="http://127.0.0.1:1/score")),
    "truncated": _constant(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{\"sco"),
    "hang_up": _constant(b""),
    "no_http": _constant(b"220 mail.example ESMTP\r\n\r\n"),
}
"""By name; "slow", "reset" and "trickle" need more than bytes and stand in `_behave`."""


async def _read(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    method, path, _ = head[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    return method, path, headers, await reader.readexactly(int(headers.get("content-length", 0)))


def seeded(seed: int, weights: dict[str, float]) -> Iterator[str]:
    """Behaviours for ever, each as often as its weight says."""
    draw = random.Random(seed)
    while True:
        yield draw.choices(list(weights), list(weights.values()))[0]


@contextmanager
def faulty_in_thread(**settings: Any) -> Iterator[FaultServer]:
    """A server for callers that have no event loop yet."""
    loop, ready, over = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    found: list[FaultServer] = []

    async def run() -> None:
        async with faulty(**settings) as server:
            found.append(server)
            ready.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert ready.wait(30)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


@asynccontextmanager
async def faulty(behaviours: Sequence[str] | Iterator[str] = (), *, tls: ssl.SSLContext | None = None,
                 **settings: Any) -> AsyncIterator[FaultServer]:
    """A server on a free port; well once the behaviours are used up."""
    server = FaultServer(iter(behaviours), **settings)
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await server.answer(reader, writer)
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            tasks.discard(task)

    listening = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
