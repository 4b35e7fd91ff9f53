"""A reward service that does as the injector orders: well, but for one request each time it is told how to fail.

An order is a file beside the strikes, which the driver writes and the service takes away when it obeys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chaos.strikes import Strikes
from tests.unit.rewards.http.fault_server import faulty_in_thread

WELL, REFUSAL = "ok", "400"
BEGINNING = 2
"""Tokens of a prompt by which it is known; all prompts have so many. Where two begin alike, both are refused."""
MANY = 20
"""After so many other requests whoever asked for the samples that failed is gone: he was lost himself."""
Samples = list[dict[str, Any]]
"""As a request has them."""


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
        self._ill: tuple[int, Samples] | None = None
        """Number of the fault that is not over, and the samples whose request failed: they are asked for again."""
        self._others = 0
        """Requests since then."""
        self._refused: set[str] = set()
        """Beginnings of prompts that have no score in this run."""

    def serve(self, strikes: Strikes) -> None:
        """Take orders that lie beside these strikes from now on, and note there how they were obeyed."""
        self._strikes, self._ill, self._refused = strikes, None, set()

    def behaviour(self, samples: Samples) -> str:
        """What a request for the scores of these samples meets."""
        if self._strikes is None:
            return WELL
        if (order := order_file(self._strikes)).exists():
            number, _, behaviour = order.read_text().partition(" ")
            order.unlink()
            # Scores that are numbers are believed, and what is refused is given up: then any request is good.
            again = [] if behaviour in ("largest", REFUSAL) else samples
            self._ill, self._others = (int(number), again), 0
            told = {"prompt": self._refuse(samples)} if behaviour == REFUSAL else {}
            self._strikes.add("confirmed", fault=int(number), state=behaviour, seconds=0.0, **told)
            return behaviour
        if self._refused and self._refused.intersection(map(beginning, samples)):
            return REFUSAL
        self._others += 1
        if self._ill is not None and (all(sample in samples for sample in self._ill[1]) or self._others == MANY):
            self._strikes.add("recovered", fault=self._ill[0])
            self._ill = None
        return WELL

    def _refuse(self, samples: Samples) -> str:
        """Give a prompt of these no score from now on; one that has had some, if there is any."""
        prompts = list(map(beginning, samples))
        prompt = next((prompt for prompt in prompts if prompt not in self._refused), prompts[0])
        self._refused.add(prompt)
        return prompt


def beginning(sample: dict[str, Any]) -> str:
    """Of a sample's prompt, in words: those of the tiny models are numbered as their tokens are."""
    return " ".join(f"w{token}" for token in sample["tokens"][:BEGINNING])


@contextmanager
def reward_service() -> Iterator[Service]:
    """A service on a free port of this machine."""
    service = Service()
    # It claims no tokenizer: what it is sent means nothing to it.
    with faulty_in_thread(choose=service.behaviour, tokenizer=None) as server:
        service.url = server.url
        yield service
