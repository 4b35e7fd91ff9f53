"""The routes of a gateway, as an ASGI application: who is asking, what is read, and how each API is answered.

Statuses that clients do not retry (stock `openai` and `anthropic` clients retry 408, 409, 429 and >= 500): 400 for a
request that asks for something else than the policy's next turn, 401 for a wrong key, 404 for an unknown session or
route, 405, 410 for a closed session, 413. To retry: 408 (the body did not arrive in time), 429 (too many requests of
the session are open), 500 (the policy failed), 503 (too many connections).
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from rlhf_ray.gateway import openai_chat
from rlhf_ray.gateway.chat import ChatReply, Refused
from rlhf_ray.gateway.fields import Asked, parse_json, shown_field
from rlhf_ray.gateway.sessions import CLOSED, MOST_OPEN, Session, Sessions

MOST_BODY_BYTES = 32 * 2**20
BODY_TIMEOUT_S = 60.0
"""Maximum time until a request's body has arrived."""
WRITE_BYTES = 2**16
"""Of an answer at a time: the client must read what was written before, but for what its connection buffers."""
MOST_FIELDS = 100
"""Fields without effect that are named in warnings: agents choose the names."""
ROUTES = ("POST /v1/chat/completions (OpenAI), POST /v1/messages (Anthropic), GET /v1/models")
NO_ROUTE = {
    "completions": "a raw prompt has no conversation that could be an episode",
    "responses": "it keeps the conversation on the server; the policy is asked with all messages",
    "embeddings": "the policy generates text",
    "messages/count_tokens": "an answer's usage has the numbers of tokens",
}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True)
class Api:
    """How an API is read and answered: pure functions of its module."""

    parse: Callable[[Mapping[str, Any]], Asked]
    answer: Callable[[Asked, ChatReply, str], bytes]
    """The whole body."""
    error: Callable[[int, str], dict[str, Any]]
    model: Callable[[str, int], dict[str, Any]]
    models: Callable[[str, int], dict[str, Any]]


def _openai_answer(asked: Asked, reply: ChatReply, model: str) -> bytes:
    created = int(time.time())
    if asked.stream:
        return b"".join(openai_chat.stream(reply, model, created, asked.show_usage))
    return json.dumps(openai_chat.answer(reply, model, created)).encode()


OPENAI = Api(openai_chat.parse, _openai_answer, openai_chat.error, openai_chat.model, openai_chat.models)


class Application:
    """ASGI application of a gateway; runs in the gateway's thread."""

    def __init__(self, sessions: Sessions, warn_once: Callable[[str, str], None]) -> None:
        self._sessions = sessions
        self._warn_once = warn_once
        self._fields: set[str] = set()
        self._started = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; the client always reads JSON of its API."""
        if scope["type"] != "http":
            return
        api, exchange = self._api_of(scope), _Exchange(receive, send)
        try:
            await self._serve(scope, api, exchange)
        except Refused as refused:
            await exchange.refuse(refused, api.error(refused.status, str(refused)))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._warn_once(f"gateway {type(error).__name__}",
                            f"gateway: a request was answered 500: {type(error).__name__}: {error}")
            await exchange.refuse(Refused(500, ""), api.error(500, "the gateway failed; the run's log says why"))

    def _api_of(self, scope: Scope) -> Api:
        return OPENAI

    async def _serve(self, scope: Scope, api: Api, exchange: _Exchange) -> None:
        session_id, _, route = unquote(scope["path"]).removeprefix("/").partition("/v1/")
        session = self._session(session_id, _headers(scope))
        if route == "models" or route.startswith("models/"):
            _require_method(scope, "GET")
            name = route.removeprefix("models").removeprefix("/")
            body = api.model(name, self._started) if name else api.models(session.model, self._started)
            await exchange.answer(json.dumps(body).encode())
        elif route == "chat/completions":
            _require_method(scope, "POST")
            await self._turn(session, api, exchange)
        else:
            why = f": {NO_ROUTE[route]}" if route in NO_ROUTE else ""
            raise Refused(404, f"there is no route {brief_route(route)}{why}; there are {ROUTES}")

    def _session(self, session_id: str, headers: Mapping[bytes, bytes]) -> Session:
        """The session of an id, if the request has its key.

        Raises:
            Refused: 404 unknown, 401 wrong key, 410 closed.
        """
        session = self._sessions.find(session_id)
        if session is None:
            raise Refused(404, "there is no such session; its address is http://HOST:PORT/SESSION/v1 as the agent was "
                               "given it")
        scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else headers.get(b"x-api-key", b"").decode("latin-1")
        if not session.admits(key):
            raise Refused(401, "the session's key is needed: Authorization: Bearer KEY, or x-api-key: KEY")
        if session.closed:
            raise Refused(410, CLOSED)
        return session

    async def _turn(self, session: Session, api: Api, exchange: _Exchange) -> None:
        """Ask the policy. When the client leaves meanwhile, the policy's `reply` is cancelled: that nobody waits for
        the turn distinguishes a request that is sent again from one that is sent twice at a time."""
        if session.requests >= MOST_OPEN:
            raise Refused(429, f"{session.requests} requests of this session are open, and may be {MOST_OPEN}", 1.0)
        session.requests += 1
        try:
            asked = api.parse(parse_json(await exchange.body()))
            self._count(session, asked)
            reply = await exchange.unless_gone(asyncio.wrap_future(session.ask(asked.request)))
            if isinstance(reply, Refused):
                raise reply
            kind = b"text/event-stream" if asked.stream else b"application/json"
            session.writing += 1
            try:
                if await exchange.answer(api.answer(asked, reply, session.model), kind):
                    session.delivered(reply)
            finally:
                session.writing -= 1
        finally:
            session.requests -= 1

    def _count(self, session: Session, asked: Asked) -> None:
        session.counts["requests"] += 1
        session.counts["sampling_overridden"] += bool(asked.overridden)
        session.counts["fields_ignored"] += bool(asked.ignored)
        for name in asked.overridden:
            self._warn_of_field(name, "which the run's own sampling replaces (generator.sampling)")
        for name in asked.ignored:
            self._warn_of_field(name, "which is ignored")

    def _warn_of_field(self, name: str, effect: str) -> None:
        shown = shown_field(name)
        if shown in self._fields or len(self._fields) >= MOST_FIELDS:
            return
        self._fields.add(shown)
        self._warn_once(f"field {shown}", f"gateway: agents send {shown}, {effect}")


class _Exchange:
    """A request's body, and its answer."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._read = False
        self._gone: asyncio.Task[None] | None = None

    async def body(self) -> bytes:
        """The whole body.

        Raises:
            Refused: 408, 413.
        """
        self._read = True
        body = bytearray()
        await self._arrive(body)
        if len(body) > MOST_BODY_BYTES:
            raise Refused(413, f"the body is larger than {MOST_BODY_BYTES} bytes")
        self._gone = asyncio.create_task(self._disconnected())
        return bytes(body)

    async def unless_gone(self, reply: asyncio.Future[ChatReply | Refused]) -> ChatReply | Refused:
        """A reply, once it is there; it is cancelled when the client disconnects. After `body`."""
        assert self._gone is not None
        await asyncio.wait((reply, self._gone), return_when=asyncio.FIRST_COMPLETED)
        if reply.done():
            return reply.result()
        reply.cancel()
        return Refused(408, "the client disconnected")

    async def answer(self, body: bytes, kind: bytes = b"application/json", status: int = 200,
                     headers: list[tuple[bytes, bytes]] | None = None) -> bool:
        """Write an answer; whether the client was still connected."""
        if self._gone is None:
            self._gone = asyncio.create_task(self._disconnected())
        try:
            if self._gone.done():
                return False
            all_headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *(headers or [])]
            await self._send({"type": "http.response.start", "status": status, "headers": all_headers})
            for start in range(0, max(len(body), 1), WRITE_BYTES):
                more = start + WRITE_BYTES < len(body)
                await self._send({"type": "http.response.body", "body": body[start: start + WRITE_BYTES],
                                  "more_body": more})
            return not self._gone.done()  # nothing is awaited in between: the last `send` says nothing of a client gone
        finally:
            self._gone.cancel()

    async def refuse(self, refused: Refused, body: dict[str, Any]) -> None:
        """Write an error, after the body was read or discarded: a client that is still sending would see its connection
        reset instead of the answer."""
        headers = []
        if refused.retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, math.ceil(refused.retry_after_s))).encode()))
        if refused.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if not self._read:
            try:
                await self._arrive(None)
            except Refused:
                headers.append((b"connection", b"close"))
        elif refused.status in (408, 413):
            headers.append((b"connection", b"close"))
        await self.answer(json.dumps(body).encode(), status=refused.status, headers=headers)

    async def _arrive(self, body: bytearray | None) -> None:
        """Read the body into `body`, as far as it is not too large; what is larger is discarded, twice the limit at
        most.

        Raises:
            Refused: 408, 413; the rest was not read.
        """
        size, more = 0, True
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise Refused(408, "the client disconnected")
                    part = message.get("body", b"")
                    size, more = size + len(part), bool(message.get("more_body"))
                    if body is not None and len(body) <= MOST_BODY_BYTES:
                        body += part
                    if size > 2 * MOST_BODY_BYTES:
                        raise Refused(413, f"the body is larger than {MOST_BODY_BYTES} bytes")
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _headers(scope: Scope) -> dict[bytes, bytes]:
    return {name.lower(): value for name, value in scope["headers"]}


def _require_method(scope: Scope, method: str) -> None:
    if scope["method"] != method:
        raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, f"the route takes {method}")


def brief_route(route: str) -> str:
    """A route in an error's message: the client wrote it."""
    return repr(f"/v1/{route[:100]}")
