"""Health checks of the servers of a reward service, and that all serve the same model."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_ray.errors import RewardError
from rlhf_ray.rewards.http.client import FailedTry, Server

TRIES, DELAY_S = 3, 1.0
LARGEST_ANSWER = 65536


@dataclass(frozen=True)
class Health:
    """A server's answer to GET /health. Other services than `rlhf-ray serve-reward` may omit the digests."""

    url: str
    digest: str | None
    """Digest of the model."""
    tokenizer: str | None
    """Digest of the model's tokenizer."""


async def ask_health(name: str, servers: Sequence[Server], needed: int) -> list[Health]:
    """The health of the servers that answer, in the order of `servers`.

    Raises:
        RewardError: fewer than `needed` answer; names the failure of each.
    """
    answers = await asyncio.gather(*(_ask(server) for server in servers))
    healths = [answer for answer in answers if isinstance(answer, Health)]
    if len(healths) < needed:
        wrong = "; ".join(f"{server.url}: {answer}" for server, answer in zip(servers, answers, strict=True)
                          if isinstance(answer, FailedTry))
        raise RewardError(f"the reward service {name!r} is not ready: {wrong}. Each of rewards.{name}.urls must answer "
                          "GET /health with 200 and JSON; start the servers first (rlhf-ray serve-reward)")
    return healths


def one_model(name: str, healths: Sequence[Health]) -> str | None:
    """Digest of the model that all servers serve; None if no server reports one.

    Raises:
        RewardError: they serve different models.
    """
    urls = {health.digest: health.url for health in healths if health.digest}
    if len(urls) > 1:
        models = ", ".join(f"{url} serves {digest}" for digest, url in urls.items())
        raise RewardError(f"the servers of rewards.{name}.urls serve different models ({models}), and a score would "
                          "depend on the server; serve the same model everywhere")
    return next(iter(urls), None)


async def _ask(server: Server) -> Health | FailedTry:
    """A server's health, or its last failure."""
    for attempt in range(TRIES):
        try:
            answer = json.loads(await server.ask("GET", "/health", most_bytes=LARGEST_ANSWER))
        except FailedTry as failure:
            last = failure
            if not failure.again or attempt == TRIES - 1:
                break
            await asyncio.sleep(DELAY_S)
        except (ValueError, RecursionError):
            return FailedTry("json", "its answer to GET /health is not JSON")
        else:
            if not isinstance(answer, dict):
                return FailedTry("schema", "its answer to GET /health is not a JSON object")
            digests = {key: value if isinstance(value := answer.get(key), str) else None
                    for key in ("digest", "tokenizer")}
            return Health(server.url, digests["digest"], digests["tokenizer"])
    return last
