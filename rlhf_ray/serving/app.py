"""The application: `/score`, `/health`, and their documentation at `/docs`."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from numpy.typing import NDArray
from starlette.exceptions import HTTPException

from rlhf_ray.serving.batcher import Batcher, QueueFullError, TooManyRowsError
from rlhf_ray.serving.schema import ErrorAnswer, HealthAnswer, ScoreAnswer, ScoreRequest
from rlhf_ray.serving.scoring import BadSampleError, ServedModel

DESCRIPTION = """\
Scores of a reward model. Samples of concurrent requests are put together into forward passes.

Errors that a second try may fix: **429** (the queue is full; `Retry-After` says for how long), **503** (stopping).
Asking twice is harmless: a score depends on the sample and the model alone. `Idempotency-Key` may be sent.
"""
ERRORS: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorAnswer, "description": "No token, or a wrong one"},
    413: {"model": ErrorAnswer, "description": "Larger than the service takes at once"},
    422: {"model": ErrorAnswer, "description": "Not of this schema, or a sample that the model cannot score"},
    429: {"model": ErrorAnswer, "description": "The queue is full"},
    500: {"model": ErrorAnswer, "description": "The model failed, or gave a score that is no finite number"},
    503: {"model": ErrorAnswer, "description": "The service is stopping"},
}


class AbandonedError(Exception):
    """The caller closed the connection before the scores were there."""


@dataclass
class Service:
    """What the routes share."""

    model: ServedModel
    batcher: Batcher
    requests: int = 0
    """Requests answered with scores."""
    stopping: bool = False
    version: str = field(default_factory=lambda: version("rlhf-ray"))


def build_app(service: Service) -> FastAPI:
    """The application around a loaded model; its batcher runs for as long as the application does."""

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

    @app.get("/health", response_model=HealthAnswer, summary="What is served, and how busy it is")
    async def health() -> JSONResponse:
        answer = HealthAnswer(
            status="stopping" if service.stopping else "ok", model=model.path, digest=model.digest,
            tokenizer=model.tokenizer_digest, dtype=model.dtype, version=service.version,
            max_tokens=model.max_tokens, queue=batcher.waiting, requests=service.requests, samples=batcher.samples,
            forward_passes=batcher.forward_passes,
        )
        return JSONResponse(answer.model_dump(), 503 if service.stopping else 200)


async def _unless_abandoned(batcher: Batcher, rows: list[Any], request: Request) -> NDArray[np.float32]:
    """Scores of the rows; they leave the queue when the caller hangs up, who would otherwise be scored for nobody."""
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
    """Every refusal is `{"error": reason}`; what was sent is never repeated in it."""

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
            return JSONResponse({"error": "send JSON, and say so: Content-Type: application/json"}, 422)
        problems = [f"{'.'.join(map(str, e['loc'][1:])) or 'body'}: {e['msg']}" for e in error.errors()[:5]]
        return JSONResponse({"error": "; ".join(problems)}, 422)
