"""Where rollouts come from, for training, evaluation and `preferences` alike: prompts are read, generators sample."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

from rlhf_ray.config.generation import GenerationConfig, SamplingConfig
from rlhf_ray.errors import WorkerLost
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.chunk import Chunk
from rlhf_ray.roles.generator import Generator
from rlhf_ray.workers.dispatcher import WorkerDispatcher
from rlhf_ray.workers.health_monitor import Decision


class Prompts(Protocol):
    """Brings the prompts of chunks: `PromptsAhead` in training, else `PromptSource`."""

    async def read_for(self, keys: Iterable[SampleKey]) -> Any:
        """Reference to prompts that hold those of some samples."""


class RolloutSource:
    """Samples responses to the prompts of a chunk, with seeds that depend on the samples' keys alone: whichever
    generator samples them, and however often, the tokens are the same for the same weights.

    Example:
        >>> source = RolloutSource(roles.dispatcher(roles.generators), prompts, seed=5)
        >>> await source.generate(chunk)
        >>> rollout = await chunk.rollout  # columns over all tokens of the chunk's samples
    """

    def __init__(self, generators: WorkerDispatcher[Generator], prompts: Prompts, seed: int,
                 sampling: SamplingConfig | None = None) -> None:
        """
        Args:
            seed: each sample's own seed is derived from it and the sample's key.
            sampling: as in the configuration of the generators if None.
        """
        self._generators = generators
        self._prompts = prompts
        self._seed = seed
        self._sampling = sampling

    async def generate(self, chunk: Chunk, again: Callable[[WorkerLost], Awaitable[None]] | None = None) -> None:
        """Fill in the chunk's `prompts`, `rollout` and `generator`; when a generator is lost, another one samples the
        chunk.

        Args:
            again: awaited before each further attempt, with the error that ended the last one.

        Raises:
            WorkerLost: an argument of the call is lost, and must be produced again.
            WorkerError: no generator can be kept alive.
            RLHFError: the error of the prompt reader or the generator.
        """
        chunk.prompts = await self._prompts.read_for(chunk.keys)
        samples = len(chunk.keys)
        while True:
            try:
                call = await self._generators.attempt(
                    Generator.generate, chunk.prompts, chunk.keys, self._seed, self._sampling,
                    phase="generate", work=samples)
                break
            except WorkerLost as error:
                if self._generators.lost(error, samples) is not Decision.RETRY:
                    raise
                if again is not None:
                    await again(error)
        chunk.rollout = call.ref
        chunk.generator = call.worker


def chunks_at_a_time(config: GenerationConfig, generators: int) -> int:
    """How many chunks so many generators sample concurrently. Deadlines run from a call on, so further chunks must
    wait before their calls."""
    return generators * (config.samples_in_flight // config.chunk)
