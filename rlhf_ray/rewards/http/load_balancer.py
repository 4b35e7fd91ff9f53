"""Load balancing over the servers of one reward service: fewest requests under way first."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from rlhf_ray.rewards.http.client import FailedTry, Server

LONGEST_PAUSE_S = 0.05
"""Longest pause between two checks while the circuit breakers of all servers are open."""


class Balancer:
    """Gives each request to the server with the fewest under way, among those whose circuit breaker is closed."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = list(servers)
        self._turn = 0

    @asynccontextmanager
    async def server(self) -> AsyncIterator[Server]:
        """A server for one try. Waits while none is available; the block's exception is the outcome of the try."""
        chosen, loop = await self._next(), asyncio.get_running_loop()
        chosen.breaker.begin()
        chosen.outstanding += 1
        try:
            yield chosen
        except FailedTry as failure:
            if failure.rest_s is None:
                chosen.breaker.failed(loop.time())
            else:
                chosen.breaker.rest(loop.time() + failure.rest_s)
            raise
        except BaseException:
            chosen.breaker.cancelled()
            raise
        else:
            chosen.breaker.succeeded()
        finally:
            chosen.outstanding -= 1

    async def _next(self) -> Server:
        while True:
            now = asyncio.get_running_loop().time()
            waits = [server.breaker.wait(now) for server in self.servers]
            ready = [server for server, wait in zip(self.servers, waits, strict=True) if wait <= 0]
            if ready:
                self._turn += 1
                return min(ready, key=lambda s: (s.outstanding, (self.servers.index(s) - self._turn)
                                                 % len(self.servers)))
            await asyncio.sleep(min(min(waits), LONGEST_PAUSE_S))
