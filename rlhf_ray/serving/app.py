"""The ASGI application: `/score`, `/health`, their documentation at `/docs`, and the middleware in front of them.

The middleware checks token, size and shutdown before a body is parsed: a caller without the token costs a header, not a
megabyte.
"""

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from numpy.typing import NDArray
from pydantic import SecretStr
from starlette.exceptions import HTTPException

from rlhf_ray.serving.batcher import Batcher, QueueFullError, TooManyRowsError
from rlhf_ray.serving.schema import ErrorAnswer, HealthAnswer, ScoreAnswer, ScoreRequest
from rlhf_ray.serving.served_model import BadSampleError, ServedModel

DESCRIPTION = """\
Scores of a reward model. Samples of concurrent requests share forward passes.

Errors to retry: **429** (the queue is full; `Retry-After` gives the wait), **503** (stopping).
Retrying is safe: a score depends only on the sample and the model. `Idempotency-Key` may be sent.
"""
ERRORS: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorAnswer, "description": "No token, or a wrong one"},
    413: {"model": ErrorAnswer, "description": "Larger than the service accepts"},
    422: {"model": ErrorAnswer, "description": "Not of this schema, or a sample that the model cannot score"},
    429: {"model": ErrorAnswer, "description": "The queue is full"},
    500: {"model": ErrorAnswer, "description": "The model failed, or gave a score that is not finite"},
    503: {"model": ErrorAnswer, "description": "The service is stopping"},
}


class AbandonedError(Exception):
    """The caller closed the connection before the scores were ready."""


@dataclass
class Service:
    """State that the routes share."""

    model: ServedModel
    batcher: Batcher
    requests: int = 0
    """Requests answered with scores."""
    stopping: bool = False
    version: str = field(default_factory=lambda: version("rlhf-ray"))


def build_app(service: Service) -> FastAPI:
    """The application for a loaded model; its batcher runs as long as the application."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        batching = asyncio.create_task(service.batcher.run())
        yield
        batching.cancel()
        with suppress(asyncio.CancelledError):
            await batching

    app = FastAPI(title="rlhf-ray serve-reward", version=service.version, description=DESCRIPTION,
                  lifespan=lifespan, redoc_url=None)
    _add_routes(app, service)
    _add_errors(app)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    model, batcher = service.model, service.batcher

    @app.post("/score", response_model=ScoreAnswer, responses=ERRORS, summary="Scores of a list of samples")
    async def score(asked: ScoreRequest, request: Request) -> ScoreAnswer:
        rows = await asyncio.to_thread(model.rows, asked.samples)
        scores = await _unless_abandoned(batcher, rows, request)
        wrong = np.flatnonzero(~np.isfinite(scores))
        if len(wrong):
            raise FloatingPointError(f"the model gave {scores[wrong[0]]} for samples.{wrong[0]}")
        service.requests += 1
        return ScoreAnswer(scores=scores.tolist(), model=model.digest)

    @app.get("/health", response_model=HealthAnswer, summary="The model being served, and its load")
    async def health() -> JSONResponse:
        answer = HealthAnswer(
            status="stopping" if service.stopping else "ok", model=model.path, digest=model.digest,
            tokenizer=model.tokenizer_digest, dtype=model.dtype, version=service.version,
            max_tokens=model.max_tokens, queue=batcher.waiting, requests=service.requests, samples=batcher.samples,
            forward_passes=batcher.forward_passes,
        )
        return JSONResponse(answer.model_dump(), 503 if service.stopping else 200)


async def _unless_abandoned(batcher: Batcher, rows: list[Any], request: Request) -> NDArray[np.float32]:
    """Scores of the rows; if the caller disconnects, its rows are removed from the queue."""
    scores = asyncio.ensure_future(batcher.score(rows))
    gone = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait((scores, gone), return_when=asyncio.FIRST_COMPLETED)
        if not scores.done():
            raise AbandonedError
        return scores.result()
    finally:
        for task in (scores, gone):
            task.cancel()


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _add_errors(app: FastAPI) -> None:
    """Every error is `{"error": reason}`, and never repeats the request."""

    def answer(kind: type[Exception], status: int) -> None:
        @app.exception_handler(kind)
        async def _(_: Request, error: Exception) -> JSONResponse:
            wait = {"Retry-After": str(error.retry_after)} if isinstance(error, QueueFullError) else None
            return JSONResponse({"error": str(error)}, status, wait)

    for kind, status in ((BadSampleError, 422), (TooManyRowsError, 413), (QueueFullError, 429),
                         (FloatingPointError, 500), (AbandonedError, 499)):
        answer(kind, status)

    @app.exception_handler(HTTPException)
    async def _(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def _(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": f"the model failed: {type(error).__name__}; see the service's log"}, 500)

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError) -> JSONResponse:
        if request.headers.get("Content-Type", "").partition(";")[0].strip().lower() != "application/json":
            return JSONResponse({"error": "send JSON with the header Content-Type: application/json"}, 422)
        problems = [f"{'.'.join(map(str, e['loc'][1:])) or 'body'}: {e['msg']}" for e in error.errors()[:5]]
        return JSONResponse({"error": "; ".join(problems)}, 422)


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/docs", "/openapi.json"})
"""Documentation pages, which reveal nothing about this service and need no token."""
BODY_TIMEOUT_S = 30.0


class Gate:
    """ASGI middleware: checks bearer token and body size, and counts requests in flight.

    Args:
        token: required bearer token; None admits all requests.
        max_bytes: maximum body size.
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
        """Respond with an error, or pass the request on to the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if scope["path"] not in OPEN_PATHS and not self._admits(headers.get(b"authorization", b"")):
            await refuse(send, 401, "a valid bearer token is needed: Authorization: Bearer TOKEN",
                         [(b"www-authenticate", b"Bearer"), (b"connection", b"close")])
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
    """A receive function that returns the body once, and then the messages of the connection."""
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
