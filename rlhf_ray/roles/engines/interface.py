"""The interface between a generator and the engine that samples for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.config.generation import GenerationConfig, SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.records import WorkerProfile

if TYPE_CHECKING:  # which imports torch, and environment variables are set before that
    from rlhf_ray.weights.receiver import Stage


@dataclass(frozen=True)
class AdapterSettings:
    """The adapters that a generator receives in place of weights."""

    rank: int
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every tensor, by its name in peft's files."""


@dataclass(frozen=True)
class EngineSettings:
    """Everything that an engine is built from."""

    model: ModelConfig
    generation: GenerationConfig
    max_context: int
    """Longest prompt and response together, in tokens."""
    seed: int
    name: str
    """Name of the generator, for messages."""
    architectures: Sequence[str]
    """Model classes named in the model's config.json."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every parameter of transformers' model, by name."""
    decode: Callable[[list[int]], str]
    """The text of some tokens, as rewards see it."""
    transport: str = "object_store"
    """How new weights are sent; see `WeightsConfig`."""
    adapters: AdapterSettings | None = None
    """Adapters that publications contain alone; None if publications contain weights."""


@dataclass(frozen=True)
class SampleRequest:
    """One response to sample. In float32 a request gives the same tokens in any batch and on any engine."""

    prompt: list[int]
    sampling: SamplingConfig
    max_tokens: int
    seed: int
    stop_tokens: Sequence[int]
    """Tokens that end the response; the one sampled is part of the response."""
    sampled: int = 0
    """How many of the prompt's last tokens are the response's first, sampled by an earlier request."""
    top_logprobs: int = 0
    """Number of most likely tokens that vLLM reports with each token, for its sampling mask; 0 gives no masks."""
    scores_prompt: bool = False
    """Return the log-probabilities of the prompt's tokens, too. The request goes before all others that wait."""

    @property
    def priority(self) -> int:
        """vLLM runs waiting requests of a lower number first."""
        return -1 if self.scores_prompt else 0

    @property
    def min_tokens(self) -> int:
        """How many of this request's tokens cannot be stop tokens."""
        return min(max(0, self.sampling.min_tokens - self.sampled), self.max_tokens)


@dataclass(frozen=True)
class Completion:
    """One sampled response; the arrays are aligned, one entry per response token."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """Log-probabilities under the distribution sampled from."""
    versions: NDArray[np.int32]
    """Version of the weights that sampled each token."""
    finish_reason: str
    """"stop" (a stop token or a stop string), "length" or "abort"."""
    masks: tuple[NDArray[np.int32], ...] = ()
    """Of each token, the tokens that it was sampled among; empty unless the request asks for them."""
    prompt_logprobs: NDArray[np.float32] | None = None
    """Log-probabilities of the prompt's tokens at temperature 1, 0 for the first; None unless the request asks for
    them."""

    def first(self, count: int) -> Completion:
        """Its first tokens."""
        return replace(self, tokens=self.tokens[:count], logprobs=self.logprobs[:count],
                       versions=self.versions[:count], masks=self.masks[:count])

    def followed_by(self, rest: Completion) -> Completion:
        """With the tokens that were sampled after it."""
        return Completion(np.concatenate([self.tokens, rest.tokens]), np.concatenate([self.logprobs, rest.logprobs]),
                          np.concatenate([self.versions, rest.versions]), rest.finish_reason, self.masks + rest.masks)


class SamplingEngine(Protocol):
    """A vLLM engine. Calls may overlap; the requests of all calls are batched together."""

    async def start(self) -> None:
        """Load the model; its weights are version 0."""
        ...

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Sample all responses. When a cancelled call ends, the engine does not have its requests any more.

        Raises:
            WorkerError: the engine died.
        """
        ...

    async def end_orphans(self) -> int:
        """Abort requests that no call of `sample` waits for; returns how many requests the engine then still has."""
        ...

    async def fused_layers(self) -> dict[str, list[str]]:
        """Parts of each layer that the model fuses, such as {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}."""
        ...

    def open_stage(self) -> Stage:
        """An empty stage for one publication's buckets, which prepares them as far as possible without pausing the
        model. It may be filled from another thread."""
        ...

    async def apply(self, stage: Any, version: int) -> float:
        """Apply staged weights between two tokens.

        Requests in flight continue with the new weights: their keys and values are recomputed, cached ones dropped.

        Returns:
            Seconds during which no token could be sampled.

        Raises:
            WeightsError: the weights are inconsistent; the old ones stay active.
            WorkerError: loading failed; this engine must not be used any more.
        """
        ...

    def tokens_made(self) -> int:
        """Tokens sampled since the start, including unfinished responses; shows whether the engine makes progress."""
        ...

    async def begin_profile(self) -> None:
        """Start profiling the engine."""
        ...

    async def end_profile(self, trace: Path) -> WorkerProfile | None:
        """Write the profile to `trace` and return its summary; None if none was recorded."""
        ...

    async def drop_profile(self) -> None:
        """Stop profiling and discard the profile."""
        ...

    async def stop(self) -> None:
        """Shut down; unfinished calls fail."""
        ...
