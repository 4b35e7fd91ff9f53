"""What stands before the application: who may ask, how much at once, and whether anybody may ask still.

Everything is decided before a body is parsed: a caller without the token costs a header, not a megabyte.
"""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from pydantic import SecretStr

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/docs", "/openapi.json"})
"""Pages that tell how to ask, and nothing about this service; no token is needed."""
BODY_TIMEOUT_S = 30.0


class Gate:
    """ASGI middleware: bearer token, size limit, and the count of requests under way.

    Args:
        token: what requests must carry; None admits everybody.
        max_bytes: largest body.
    """

    def __init__(self, app: App, token: SecretStr | None, max_bytes: int) -> None:
        self._app, self._token, self._max_bytes = app, token, max_bytes
        self._idle = asyncio.Event()
        self._idle.set()
        self.under_way = 0
        """Requests accepted and not answered yet."""
        self.stopping = False
        """Set once: new requests are answered 503 from then on."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or hand on to the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if scope["path"] not in OPEN_PATHS and not self._admits(headers.get(b"authorization", b"")):
            await refuse(send, 401, "a valid bearer token is needed: Authorization: Bearer TOKEN",
                         [(b"www-authenticate", b"Bearer")])
        elif self.stopping and scope["path"] != "/health":
            await refuse(send, 503, "the service is stopping", [(b"retry-after", b"1"), (b"connection", b"close")])
        else:
            await self._pass(scope, receive, send)

    async def drained(self) -> None:
        """Wait until no request is under way."""
        await self._idle.wait()

    def _admits(self, authorization: bytes) -> bool:
        """Compared in constant time, so that the time of an answer tells nothing of the token."""
        if self._token is None:
            return True
        scheme, _, given = authorization.partition(b" ")
        right = hmac.compare_digest(given.strip(), self._token.get_secret_value().encode())
        return scheme.lower() == b"bearer" and right

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.under_way += 1
        self._idle.clear()
        try:
            body = await self._read(receive)
            if isinstance(body, bytes):
                await self._app(scope, _replay(body, receive), send)
            else:
                await refuse(send, *body, [(b"connection", b"close")])
        finally:
            self.under_way -= 1
            if not self.under_way:
                self._idle.set()

    async def _read(self, receive: Receive) -> bytes | tuple[int, str]:
        """The whole body, or the status code and reason of a refusal."""
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await receive()
                    body += message.get("body", b"")
                    if len(body) > self._max_bytes:
                        return 413, f"the body is larger than {self._max_bytes} bytes; send fewer samples at a time"
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            return 408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s"


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body once, and then what the connection says (that it closed)."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def refuse(send: Send, status: int, reason: str, headers: list[tuple[bytes, bytes]]) -> None:
    """Answer with an error as JSON."""
    body = b'{"error":"%s"}' % reason.encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
