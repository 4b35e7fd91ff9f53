"""A reward service that answers correctly, except for one request each time it is ordered to fail.

An order is a file beside the injection log. The driver writes it; the service deletes it when it obeys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chaos.injection_log import InjectionLog
from chaos.witness.journals import REFUSED, SCORED, SERVICE, Journal
from tests.unit.rewards.http.fault_server import faulty_in_thread, parity

OK, PARITY, REFUSAL = "ok", "parity", "400"
PREFIX_TOKENS = 2
"""A prompt is identified by its first tokens; all prompts have this many. Prompts with equal prefixes are refused
together."""
GIVEN_UP_REQUESTS = 20
"""After this many other requests the worker that sent the failed request no longer exists, and does not repeat it."""
Samples = list[dict[str, Any]]
"""The samples of a request."""


def failure_order_file(injections: InjectionLog) -> Path:
    """The file of an order."""
    return injections.path.with_suffix(".order")


def order_failure(injections: InjectionLog, number: int, behaviour: str) -> None:
    """Order the next request to fail with a behaviour. `number` is the fault's."""
    unfinished = failure_order_file(injections).with_suffix(".new")
    unfinished.write_text(f"{number} {behaviour}")
    unfinished.replace(failure_order_file(injections))


class RewardService:
    """The service, and the run that it serves at present."""

    def __init__(self) -> None:
        self.url = ""
        self._injections: InjectionLog | None = None
        self._unrecovered: dict[int, Samples] = {}
        """Number of each fault that is not over -> the samples of the failed request, which is repeated. There may be
        several: another request can be the next to fail before the first one is repeated."""
        self._since: Counter[int] = Counter()
        """Number of a fault -> requests since then."""
        self._refused: set[str] = set()
        """Prefixes of prompts that get no score in this run."""
        self._journal: Journal | None = None
        self.good = OK
        """The behaviour of a request that does not fail."""

    def serve(self, injections: InjectionLog, journals: Path) -> None:
        """Obey the orders beside this injection log from now on, log there how they were obeyed, and note the samples
        that get scores in a journal of this directory."""
        self._injections, self._unrecovered, self._refused = injections, {}, set()
        self._since.clear()
        self._journal = Journal(journals, SERVICE)

    def behaviour(self, samples: Samples) -> str:
        """The behaviour of the service for a request with these samples."""
        behaviour = self._behaviour(samples)
        if behaviour == OK:
            behaviour = self.good
        if self._journal is not None and behaviour in (OK, PARITY, "largest"):
            scores = {"scores": [parity(sample) for sample in samples]} if behaviour == PARITY else {}
            self._journal.add(SCORED, samples=[sample["tokens"] for sample in samples], **scores)
        return behaviour

    def _behaviour(self, samples: Samples) -> str:
        if self._injections is None:
            return OK
        if (order := failure_order_file(self._injections)).exists():
            number, _, behaviour = order.read_text().partition(" ")
            order.unlink()
            # Finite scores are accepted, and a refused prompt is given up: then any successful request is a recovery.
            self._unrecovered[int(number)] = [] if behaviour in ("largest", REFUSAL) else samples
            fields = {"prompt": self._refuse(samples)} if behaviour == REFUSAL else {}
            self._injections.add("confirmed", fault=int(number), state=behaviour, seconds=0.0, **fields)
            return behaviour
        if self._refused and self._refused.intersection(map(prompt_prefix, samples)):
            return REFUSAL
        for fault, repeated in list(self._unrecovered.items()):
            self._since[fault] += 1
            if all(sample in samples for sample in repeated) or self._since[fault] == GIVEN_UP_REQUESTS:
                self._injections.add("recovered", fault=fault)
                del self._unrecovered[fault]
        return OK

    def _refuse(self, samples: Samples) -> str:
        """Refuse one of these prompts from now on: if possible, one that was not refused before."""
        prompts = list(map(prompt_prefix, samples))
        prompt = next((prompt for prompt in prompts if prompt not in self._refused), prompts[0])
        self._refused.add(prompt)
        if self._journal is not None:
            self._journal.add(REFUSED, prompt=[int(word.removeprefix("w")) for word in prompt.split()])
        return prompt


def prompt_prefix(sample: dict[str, Any]) -> str:
    """The first words of a sample's prompt. The tiny models' words are named after their token ids."""
    return " ".join(f"w{token}" for token in sample["tokens"][:PREFIX_TOKENS])


@contextmanager
def reward_service() -> Iterator[RewardService]:
    """A service on a free port of this machine."""
    service = RewardService()
    # It names no tokenizer: its scores do not depend on the meaning of the tokens.
    with faulty_in_thread(choose=service.behaviour, tokenizer=None) as server:
        service.url = server.url
        yield service
