"""What every source of rewards is asked, what it answers, and when it may be asked.

A source is built from its section of `rewards`, started once in the reward scorer's process, asked many times and
stopped once. All three methods are coroutines: a source that waits for others (a service, a process of its own) lets
the event loop go on meanwhile, one that computes does so in a thread (`asyncio.to_thread`). Several chunks may be asked
about at the same time; a source that can do one thing at a time holds a lock of its own.

An answer depends on the requests alone, never on what was asked before, so asking again is harmless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.records import SampleKey


@dataclass(frozen=True)
class RewardRequest:
    """One response to judge, as text and as the policy's tokens."""

    key: SampleKey
    prompt: str
    """Prompt text as the policy's tokenizer saw it (a rendered chat template where the prompt is messages)."""
    response: str
    """What the policy wrote, special tokens left out."""
    tokens: NDArray[np.int32]
    """[T] prompt and response in the policy's token ids."""
    response_mask: NDArray[np.bool_]
    """[T] True on tokens the policy sampled."""
    finish_reason: str
    """"stop" (ended by itself), "length" or "abort"."""
    metadata: dict[str, Any]
    """The other columns of the prompt's row: an answer, a label, a domain."""
    messages: list[dict[str, Any]] | None = None
    """The prompt as chat messages, where the data set has messages."""


@dataclass(frozen=True)
class RewardAnswer:
    """What a source says of N requests, in their order. Never holds a score that nobody gave."""

    scores: NDArray[np.float32]
    """[N] one finite number per response, before the component's weight."""
    token_rewards: NDArray[np.float32] | None = None
    """[sum of T] over the requests' tokens, one request after another: where within the responses the scores fall.
    Zero where response_mask is False; each row's sum is its score. None: each score falls on the response's last
    token."""
    failures: int = 0
    """Requests that could not be judged in the ordinary way although they have a score: a call that had to be
    repeated, a response without the number that was looked for."""
    failure_kinds: dict[str, int] = field(default_factory=dict)
    """What went wrong on the way and how often, by one word each ("timeout", "http_503"); empty where a source does not
    tell kinds apart."""


class RewardSource(Protocol):
    """One component of the reward."""

    async def start(self) -> Mapping[str, float] | None:
        """Make ready: load the model, start the process, reach the service.

        Returns:
            numbers about the start, if there are any.

        Raises:
            ModelError, RewardError: it cannot work; said for a person.
        """

    async def score(self, requests: Sequence[RewardRequest]) -> RewardAnswer:
        """Judge the responses, at least one.

        Raises:
            RewardError: no finite score for each; names the source, the samples and the fix.
        """

    async def stop(self) -> None:
        """Let go of everything, within a few seconds even when a call hangs. Stopping twice changes nothing."""


def sample_names(keys: Sequence[SampleKey], most: int = 3) -> str:
    """The first samples by name, for error messages: "epoch 0 row 4 sample 1, ... and 7 more"."""
    named = ", ".join(f"epoch {k.epoch} row {k.row} sample {k.sample}" for k in keys[:most])
    return f"{named} and {len(keys) - most} more" if len(keys) > most else named
