"""Whether servers are there, and serve one and the same model."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_ray.errors import RewardError
from rlhf_ray.rewards.http.server import FailedTry, Server

TRIES, DELAY_S = 3, 1.0
LARGEST_ANSWER = 65536


@dataclass(frozen=True)
class Health:
    """What a server says of itself. Services that are not ours need not say more than that they are there."""

    url: str
    digest: str | None
    """Digest of the model."""
    tokenizer: str | None
    """Digest of the model's tokenizer."""


async def ask_health(name: str, servers: Sequence[Server], needed: int) -> list[Health]:
    """What the servers that are there say, in the order of `servers`.

    Raises:
        RewardError: fewer than `needed` are there; says what is wrong with each.
    """
    answers = await asyncio.gather(*(_ask(server) for server in servers))
    there = [answer for answer in answers if isinstance(answer, Health)]
    if len(there) < needed:
        wrong = "; ".join(f"{server.url}: {answer}" for server, answer in zip(servers, answers, strict=True)
                          if isinstance(answer, FailedTry))
        raise RewardError(f"the reward service {name!r} is not ready: {wrong}. Each of rewards.{name}.urls must answer "
                          "GET /health with 200 and JSON; start the servers first (rlhf-ray serve-reward)")
    return there


def one_model(name: str, healths: Sequence[Health]) -> str | None:
    """Digest of the model that all servers serve; None when none of them tells.

    Raises:
        RewardError: they serve different ones.
    """
    told = {health.digest: health.url for health in healths if health.digest}
    if len(told) > 1:
        models = ", ".join(f"{url} serves {digest}" for digest, url in told.items())
        raise RewardError(f"the servers of rewards.{name}.urls serve different models ({models}), and a score would "
                          "depend on who happens to give it; serve the same model everywhere")
    return next(iter(told), None)


async def _ask(server: Server) -> Health | FailedTry:
    """What a server says, or its last failure."""
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
                return FailedTry("schema", "its answer to GET /health is no JSON object")
            told = {key: value if isinstance(value := answer.get(key), str) else None
                    for key in ("digest", "tokenizer")}
            return Health(server.url, told["digest"], told["tokenizer"])
    return last
