"""Connections of the reward service: their number, and deadlines until the application sees a request and after it.

uvicorn (0.54) waits for a request's headers without limit, keeps a connection whose caller does not read until it does,
and its `limit_concurrency` refuses requests, not connections: a few hundred callers without a token could keep others
out. httptools, which it prefers, accepts headers of any size; h11 accepts 64 KiB.
"""

import asyncio
from http import HTTPStatus

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_TIMEOUT_S = 10.0
"""Maximum time until the headers of a connection's first request are complete."""
KEEPALIVE_S = 30
"""Idle connections stay open this long after a response."""
WRITE_TIMEOUT_S = 30.0
"""Maximum time in which a caller reads nothing of a response that waits to be sent."""
MAX_CONNECTIONS = 512
"""Connections at a time, half of the usual limit of a process's open files."""
REFUSAL = b'{"error":"the service has as many connections as it takes; try again later"}'


class BoundedConnection(H11Protocol):
    """uvicorn's connection with deadlines, and a limit on the number of connections."""

    refusal: bytes = REFUSAL
    """JSON that a connection beyond the limit is answered."""
    _deadline: asyncio.TimerHandle | None = None
    _write_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or answer 503 and close it."""
        super().connection_made(transport)
        self._expect_headers(HEADERS_TIMEOUT_S)
        if len(self.connections) > self.most_connections():
            status = HTTPStatus.SERVICE_UNAVAILABLE
            transport.write(b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                            b"retry-after: 1\r\nconnection: close\r\n\r\n%s"
                            % (status, status.phrase.encode(), len(self.refusal), self.refusal))
            transport.close()

    def most_connections(self) -> int:
        """Connections at a time."""
        return MAX_CONNECTIONS

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadlines."""
        super().connection_lost(exc)
        self.resume_writing()
        if self._deadline is not None:
            self._deadline.cancel()

    def data_received(self, data: bytes) -> None:
        """The application has its own deadlines from the end of the headers on."""
        super().data_received(data)
        if self._answers and self._deadline is not None:
            self._deadline.cancel()

    def on_response_complete(self) -> None:
        """Close the connection unless another request arrives in time."""
        super().on_response_complete()
        if not self._answers:  # otherwise the next request was there already
            self._expect_headers(KEEPALIVE_S + HEADERS_TIMEOUT_S)

    def pause_writing(self) -> None:
        """The caller does not read; the buffer is full."""
        super().pause_writing()
        self._write_deadline = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """The caller reads again."""
        super().resume_writing()
        if self._write_deadline is not None:
            self._write_deadline.cancel()

    @property
    def _answers(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_headers(self, within_s: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(within_s, self.transport.abort)
