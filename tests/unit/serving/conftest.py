"""A tiny reward model behind the application, asked without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from rlhf_ray.config.model import ModelConfig
from tests.models import make_tiny_reward_model


@pytest.fixture(scope="session")
def reward_directory(tmp_path_factory):
    """A random reward model of 64 words and context 128."""
    return make_tiny_reward_model(tmp_path_factory.mktemp("served") / "reward", vocab=64, positions=128)


@pytest.fixture(scope="session")
def served_model(reward_directory):
    from rlhf_ray.serving.served_model import ServedModel

    return ServedModel(ModelConfig(path=str(reward_directory)), 512)


@pytest.fixture
def asking(served_model):
    """asking(script, **settings) -> what script(client, gate, service) returns, with the application running."""

    def ask(script: Callable[..., Any], *, token: str | None = None, max_bytes: int = 100_000, max_queue: int = 100,
            model: Any = served_model) -> Any:
        async def run() -> Any:
            async with application(model, token, max_bytes, max_queue) as (client, gate, service):
                return await script(client, gate, service)

        return asyncio.run(run())

    return ask


@asynccontextmanager
async def application(model: Any, token: str | None, max_bytes: int, max_queue: int) -> AsyncIterator[Any]:
    from rlhf_ray.serving.app import Gate, Service, build_app
    from rlhf_ray.serving.batcher import Batcher

    service = Service(model, Batcher(model.score, 512, 0.005, max_queue))
    app = build_app(service)
    gate = Gate(app, SecretStr(token) if token else None, max_bytes)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(gate, raise_app_exceptions=False)  # type: ignore[arg-type]
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://t") as client:
        yield client, gate, service
