"""A reward service that does as the injector orders: well, but for one request each time it is told how to fail.

An order is a file beside the strikes, which the driver writes and the service takes away when it obeys.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chaos.strikes import Strikes
from tests.unit.rewards.http.fault_server import faulty_in_thread

WELL = "ok"


def order_file(strikes: Strikes) -> Path:
    """Where the driver leaves an order."""
    return strikes.path.with_suffix(".order")


def give_order(strikes: Strikes, number: int, behaviour: str) -> None:
    """Have the next request fail so. `number` is the fault's."""
    unfinished = order_file(strikes).with_suffix(".new")
    unfinished.write_text(f"{number} {behaviour}")
    unfinished.replace(order_file(strikes))


class Service:
    """The service, and which run it serves at present."""

    def __init__(self) -> None:
        self.url = ""
        self._strikes: Strikes | None = None
        self._ill: int | None = None
        """Number of the fault after which no request was answered well yet."""

    def serve(self, strikes: Strikes) -> None:
        """Take orders that lie beside these strikes from now on, and note there how they were obeyed."""
        self._strikes, self._ill = strikes, None

    def behaviours(self) -> Iterator[str]:
        """What each request meets, for ever."""
        while True:
            yield self._next()

    def _next(self) -> str:
        if self._strikes is None:
            return WELL
        if (order := order_file(self._strikes)).exists():
            number, _, behaviour = order.read_text().partition(" ")
            order.unlink()
            self._ill = int(number)
            self._strikes.add("confirmed", fault=self._ill, state=behaviour, seconds=0.0)
            return behaviour
        if self._ill is not None:
            self._strikes.add("mended", fault=self._ill, at=time.time())
            self._ill = None
        return WELL


@contextmanager
def reward_service() -> Iterator[Service]:
    """A service on a free port of this machine."""
    service = Service()
    # It claims no tokenizer: what it is sent means nothing to it.
    with faulty_in_thread(behaviours=service.behaviours(), tokenizer=None) as server:
        service.url = server.url
        yield service
