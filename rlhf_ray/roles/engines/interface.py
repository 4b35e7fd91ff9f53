"""What a generator asks of the engine that samples for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.config.generation import GenerationConfig, SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.records import WorkerProfile
from rlhf_ray.weights.receiver import Stage


@dataclass(frozen=True)
class EngineSettings:
    """All an engine is built from."""

    model: ModelConfig
    generation: GenerationConfig
    max_context: int
    """Longest prompt and response together, in tokens."""
    seed: int
    name: str
    """The generator's name, for messages."""
    architectures: Sequence[str]
    """Model classes named in the model's config.json."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every tensor of the model's checkpoint, by name."""
    transport: str = "object_store"
    """How new weights come; see `WeightsConfig`."""


@dataclass(frozen=True)
class SampleRequest:
    """One response to draw. The same request gives the same tokens alone, in any batch, on any engine (float32)."""

    prompt: list[int]
    sampling: SamplingConfig
    max_tokens: int
    seed: int
    stop_tokens: Sequence[int]
    """Sampling one of these ends the response; it is part of the response."""


@dataclass(frozen=True)
class Completion:
    """One drawn response; the arrays are aligned, one entry per response token."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """Log-probabilities under the distribution sampled from."""
    versions: NDArray[np.int32]
    """Version of the weights that made each token."""
    finish_reason: str
    """"stop", "length" or "abort"."""


class SamplingEngine(Protocol):
    """A running vLLM engine. Calls may overlap; requests of all calls are batched together."""

    kind: str

    async def start(self) -> None:
        """Load the model; its weights are version 0."""
        ...

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Draw all responses. Cancelling the call aborts its requests.

        Raises:
            WorkerError: the engine died.
        """
        ...

    async def score(self, rows: Sequence[list[int]]) -> list[NDArray[np.float32]]:
        """Per row `[L]`: log-probability of each token given those before it, at temperature 1; 0 for the first."""
        ...

    def open_stage(self) -> Stage:
        """A place for one publication's buckets, where they come as near to the model as is possible without pausing
        it. It may be filled from another thread."""
        ...

    async def apply(self, stage: Any, version: int) -> float:
        """Put staged weights in service between two tokens.

        Requests in flight go on with the new weights: their keys and values are computed again, cached ones dropped.

        Returns:
            Seconds for which no token could be made.

        Raises:
            WeightsError: they do not fit together; the old ones are in service.
            WorkerError: the model did not take them; this engine must not be used any more.
        """
        ...

    def tokens_made(self) -> int:
        """Tokens sampled since the start, those of unfinished responses included: a sign of life."""
        ...

    def pids(self) -> list[int]:
        """All processes of the engine."""
        ...

    async def begin_profile(self) -> None:
        """Record what the engine computes from now on."""
        ...

    async def end_profile(self, trace: Path) -> WorkerProfile | None:
        """Write what was recorded to `trace`, and sum it up; None if nothing was."""
        ...

    async def drop_profile(self) -> None:
        """Record no more, and forget what was."""
        ...

    async def stop(self) -> None:
        """Shut down; unfinished calls fail."""
        ...
