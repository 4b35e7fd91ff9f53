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
from dataclasses import replace
from typing import Any

from rlhf_ray.gateway import anthropic_messages, openai_chat
from rlhf_ray.gateway.chat import ChatReply, Refused
from rlhf_ray.gateway.fields import Asked, parse_json, shown_field
from rlhf_ray.gateway.sessions import CLOSED, MOST_OPEN, Session, Sessions

MOST_BODY_BYTES = 32 * 2**20
BODY_TIMEOUT_S = 60.0
"""Maximum time until a request's body has arrived."""
WRITE_BYTES = 2**16
"""Of an answer at a time: the client must read what was written before, but for what its connection buffers."""
RETRIES = b"x-stainless-retry-count"
"""Header of the stock clients of OpenAI and Anthropic: how often the request was sent before."""
MOST_FIELDS = 100
"""Fields without effect that are named in warnings: agents choose the names."""
ROUTES = "POST /v1/chat/completions (OpenAI), POST /v1/messages (Anthropic), GET /v1/models"
NO_ROUTE = {
    "completions": "a raw prompt has no conversation that could be an episode",
    "responses": "it keeps the conversation on the server; the policy is asked with all messages",
    "embeddings": "the policy generates text",
    "messages/count_tokens": "an answer's usage has the numbers of tokens",
}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Parse = Callable[[Mapping[str, Any]], Asked]
Write = Callable[[Asked, ChatReply, str], bytes]
"""Makes the whole body of an answer, with the model's name."""


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
        headers = {name.lower(): value for name, value in scope["headers"]}
        exchange = _Exchange(receive, send, is_retry=headers.get(RETRIES, b"0") != b"0")
        session_id, _, route = scope["path"].removeprefix("/").partition("/v1/")
        anthropic = b"anthropic-version" in headers or route.partition("/")[0] == "messages"
        api: Any = anthropic_messages if anthropic else openai_chat
        try:
            session = self._session(session_id, headers)
            await self._serve(scope["method"], session, route, api, exchange)
        except Refused as refused:
            await exchange.refuse(refused, api.error(refused.status, str(refused)))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._warn_once(f"gateway {type(error).__name__}",
                            f"gateway: a request was answered 500: {type(error).__name__}: {error}")
            await exchange.refuse(Refused(500, ""), api.error(500, "the gateway failed; the run's log says why"))

    async def _serve(self, method: str, session: Session, route: str, api: Any, exchange: _Exchange) -> None:
        if route == "models" or route.startswith("models/"):
            _require(method, "GET")
            name = route.removeprefix("models").removeprefix("/")
            body = api.model(name, self._started) if name else api.models(session.model, self._started)
            await exchange.answer(json.dumps(body).encode())
        elif route == "chat/completions":
            _require(method, "POST")
            await self._turn(session, openai_chat.parse, _openai_answer, exchange)
        elif route == "messages":
            _require(method, "POST")
            await self._turn(session, anthropic_messages.parse, _anthropic_answer, exchange)
        else:
            why = f": {NO_ROUTE[route]}" if route in NO_ROUTE else ""
            raise Refused(404, f"there is no route {_shown(route)}{why}; the routes are {ROUTES}")

    def _session(self, session_id: str, headers: Mapping[bytes, bytes]) -> Session:
        """The session of an id, if the request has its key.

        Raises:
            Refused: 404 unknown, 401 wrong key, 410 closed.
        """
        session = self._sessions.find(session_id)
        if session is None:
            raise Refused(404, "there is no such session; its address is http://HOST:PORT/SESSION/v1 as the agent was "
                               "given it")
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        keys = [token.strip() if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b"")]
        if not any(session.admits(key) for key in keys):  # Anthropic's client may send both
            raise Refused(401, "the session's key is needed: Authorization: Bearer KEY, or x-api-key: KEY")
        if session.closed:
            raise Refused(410, CLOSED)
        return session

    async def _turn(self, session: Session, parse: Parse, write: Write, exchange: _Exchange) -> None:
        """Ask the policy. When the client leaves meanwhile, the policy's `reply` is cancelled: that nobody waits for
        the turn distinguishes a request that is sent again from one that is sent twice at a time."""
        if session.requests >= MOST_OPEN:
            raise Refused(429, f"{session.requests} requests of this session are open, and may be {MOST_OPEN}", 1.0)
        session.requests += 1
        request, written = None, False
        try:
            asked = parse(parse_json(await exchange.body()))
            self._warn_of_fields(asked)
            request = replace(asked.request, is_overridden=bool(asked.overridden), is_retry=exchange.is_retry)
            reply = await exchange.unless_gone(asyncio.wrap_future(session.ask(request)))
            if isinstance(reply, Refused):
                raise reply
            kind = b"text/event-stream" if asked.stream else b"application/json"
            session.writing += 1
            try:
                written = await exchange.answer(write(asked, reply, session.model), kind)
                if written:
                    session.delivered(reply)
            finally:
                session.writing -= 1
        finally:
            session.requests -= 1
            if request is not None and not written:
                session.left(request)

    def _warn_of_fields(self, asked: Asked) -> None:
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

    def __init__(self, receive: Receive, send: Send, is_retry: bool) -> None:
        self.is_retry = is_retry
        """The client says that it sends the request again."""
        self._receive, self._send = receive, send
        self._gone: asyncio.Task[None] | None = None

    async def body(self) -> bytes:
        """The whole body.

        Raises:
            Refused: 408, 413.
        """
        body, more = bytearray(), True
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise Refused(408, "the client disconnected")
                    body += message.get("body", b"")
                    more = bool(message.get("more_body"))
                    if len(body) > MOST_BODY_BYTES:
                        raise Refused(413, f"the body is larger than {MOST_BODY_BYTES} bytes")
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
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
        """Write an answer; whether the client that sent a body was still connected."""
        all_headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *(headers or [])]
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})
        for start in range(0, max(len(body), 1), WRITE_BYTES):
            more = start + WRITE_BYTES < len(body)
            part = body[start: start + WRITE_BYTES]
            if start and not more:
                await self._notice()
            await self._send({"type": "http.response.body", "body": part, "more_body": more})
        if self._gone is None:
            return False
        connected = not self._gone.done()  # asked before anything is awaited: it also ends when the answer is complete
        self._gone.cancel()
        return connected

    async def refuse(self, refused: Refused, body: dict[str, Any]) -> None:
        """Write an error. A client that is still sending its body may do so for a while: it is discarded until the
        connection's time for the next request is over. Closed at once, the connection would be reset, and the client
        would not see the answer."""
        headers = []
        if refused.retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, math.ceil(refused.retry_after_s))).encode()))
        if refused.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if refused.status == 408:
            headers.append((b"connection", b"close"))
        await self.answer(json.dumps(body).encode(), status=refused.status, headers=headers)

    async def _notice(self) -> None:
        """Let the loop see that a write failed: it calls `connection_lost`, whose event wakes `receive`, which ends
        `_disconnected`."""
        for _ in range(3):
            await asyncio.sleep(0)

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _openai_answer(asked: Asked, reply: ChatReply, model: str) -> bytes:
    created = int(time.time())
    if asked.stream:
        return b"".join(openai_chat.stream(reply, model, created, asked.show_usage))
    return json.dumps(openai_chat.answer(reply, model, created)).encode()


def _anthropic_answer(asked: Asked, reply: ChatReply, model: str) -> bytes:
    if asked.stream:
        return b"".join(anthropic_messages.stream(reply, model, asked.show_reasoning))
    return json.dumps(anthropic_messages.answer(reply, model, asked.show_reasoning)).encode()


def _require(method: str, required: str) -> None:
    if method != required:
        raise Refused(405, f"the route has the method {required}")


def _shown(route: str) -> str:
    """A route in an error's message: the client wrote it."""
    return repr(f"/v1/{route[:100]}")
