"""Where rollouts come from, for training, evaluation and `preferences` alike: rows are read by number from the prompt
reader, and generators sample responses to them. Prompts and rollouts are references here."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Protocol

from rlhf_ray.config.data import PromptsConfig
from rlhf_ray.config.derived import episodes_deadline_s
from rlhf_ray.config.generation import GenerationConfig, SamplingConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.episode_journals import EpisodeJournals
from rlhf_ray.data.contents import Contents, check_contents
from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.data.load_report import LeftOutRows
from rlhf_ray.errors import WorkerLost
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.chunk import Chunk
from rlhf_ray.roles.data_readers import HELD_OUT, PromptReader
from rlhf_ray.roles.episode_journal import JournalPlace
from rlhf_ray.roles.episode_runner import EpisodeRunner
from rlhf_ray.roles.generator import Generator
from rlhf_ray.workers.calls import Call, Deadline
from rlhf_ray.workers.dispatcher import WorkerDispatcher
from rlhf_ray.workers.health_monitor import Decision, Ready
from rlhf_ray.workers.role_groups import RoleGroups
from rlhf_ray.workers.worker_group import WorkerGroup

AHEAD = 8
"""Chunks whose prompts are read in one call. Each role that reads a chunk's prompts receives all of them."""


@dataclass(frozen=True)
class PromptSource:
    """One table of the prompt reader."""

    reader: WorkerDispatcher[PromptReader]
    table: str
    sizes: list[int]
    """Rows of each of its data sets; rows are numbered from 0 over all of them."""
    reports: list[str]
    """Load report of each."""
    contents: Contents = field(default_factory=list)
    """Digest of the rows of each."""
    left_out: LeftOutRows = field(default_factory=list)
    """Rows of the data sets that were left out."""
    held_out: "PromptSource | None" = None
    """The held-out rows of this table, if any."""
    chat: bool = False
    """Whether its first prompt is a conversation."""
    limit: int | None = None
    """Only the first rows of each data set are used; None for all."""

    @property
    def rows(self) -> int:
        """How many rows are used."""
        return sum(map(self._used, self.sizes))

    @property
    def numbers(self) -> list[int]:
        """The numbers of the rows that are used."""
        starts = accumulate(self.sizes, initial=0)
        return [start + i for start, size in zip(starts, self.sizes, strict=False) for i in range(self._used(size))]

    def _used(self, size: int) -> int:
        return size if self.limit is None else min(size, self.limit)

    @classmethod
    async def open(cls, reader: WorkerDispatcher[PromptReader], table: str, config: PromptsConfig) -> "PromptSource":
        """Have the reader, which has one worker, tokenise the data of a section.

        Raises:
            DataError, ModelError: it cannot be read; see `data.prompt_table.open_prompts`.
        """
        table_info = await reader.value(PromptReader.open, table, config)
        held_out = None
        if any(table_info["held_out"]):
            held_out = cls(reader, HELD_OUT, table_info["held_out"], [], table_info["contents"])
        return cls(reader, table, table_info["sizes"], table_info["reports"], table_info["contents"],
                   table_info["left_out"], held_out, table_info["chat"])

    def first_held_out(self, limit: int | None) -> "PromptSource | None":
        """The held-out rows of this table, or the first `limit` of each data set."""
        return None if self.held_out is None else replace(self.held_out, limit=limit)

    async def read_for(self, keys: Iterable[SampleKey]) -> Any:
        """Reference to the prompts of a chunk, each row once."""
        return await self.read(key.row for key in keys)

    async def read(self, rows: Iterable[int]) -> Any:
        """Reference to the prompts of some rows, each once, after they were read."""
        return (await self.reader.call(PromptReader.rows, list(dict.fromkeys(rows)), self.table, phase="read")).ref


def reopened(
    reader: WorkerGroup[PromptReader], tables: Mapping[str, PromptsConfig], contents: Mapping[str, Contents],
) -> Ready:
    """A callback that opens the tables again in a restarted reader, with the same rows under the same numbers. It
    raises CheckpointError if a data set has changed since.

    Args:
        contents: digests of each table when it was first opened; tables that were not opened yet are missing.
    """
    async def ready(rank: int, readmit: Callable[[], None]) -> str:
        for table, config in tables.items():
            opened = await reader.call(rank, PromptReader.open, table, config).value()
            if table in contents:
                check_contents(contents[table], opened["contents"])
        readmit()
        return "its tables read again"

    return ready


class PromptsAhead:
    """A source read ahead in the order of a cursor: one call reads the prompts of the next several chunks."""

    def __init__(self, source: PromptSource, cursor: PromptCursor) -> None:
        self._source, self._cursor = source, cursor
        self._coming: dict[int, asyncio.Task[Any]] = {}
        """Row drawn, or soon to be, -> what brings its prompts."""

    def draw(self, count: int) -> list[tuple[int, int]]:
        """The cursor's next (epoch, row) pairs, whose prompts are on their way from now on."""
        drawn = self._cursor.next(count)
        rows = [row for _, row in drawn]
        if not all(row in self._coming for row in rows):
            rows += [row for _, row in self._cursor.peek(count * (AHEAD - 1))]
            self._coming.update(dict.fromkeys(rows, asyncio.create_task(self._source.read(rows))))
        return drawn

    async def read_for(self, keys: Iterable[SampleKey]) -> Any:
        """Reference to prompts that hold those of a chunk; of a chunk that was not just drawn, to these alone."""
        rows = dict.fromkeys(key.row for key in keys)
        found = {self._coming.pop(row, None) for row in rows}
        together = found.pop() if len(found) == 1 else None
        return await (self._source.read(rows) if together is None else asyncio.shield(together))


class Prompts(Protocol):
    """Brings the prompts of chunks: `PromptsAhead` in training, else `PromptSource`."""

    async def read_for(self, keys: Iterable[SampleKey]) -> Any:
        """Reference to prompts that hold those of some samples."""


class RolloutSource:
    """Samples responses to the prompts of a chunk, or has its episodes played, with seeds that depend on the samples'
    keys alone: whichever generator samples them, and however often, the tokens are the same for the same weights.

    Example:
        >>> source = RolloutSource(roles.dispatcher(roles.generators), prompts, seed=5)
        >>> await source.generate(chunk)
        >>> rollout = await chunk.rollout  # columns over all tokens of the chunk's samples
    """

    def __init__(self, generators: WorkerDispatcher[Generator], prompts: Prompts, seed: int,
                 sampling: SamplingConfig | None = None, episodes: "EpisodeSource | None" = None) -> None:
        """
        Args:
            seed: each sample's own seed is derived from it and the sample's key.
            sampling: as in the configuration of the generators if None.
            episodes: plays the samples as episodes; None: each is one response.
        """
        self._generators = generators
        self._prompts = prompts
        self._seed = seed
        self._sampling = sampling
        self._episodes = episodes
        self._dispatcher: WorkerDispatcher[Any] = generators if episodes is None else episodes.runners

    async def generate(self, chunk: Chunk, again: Callable[[WorkerLost], Awaitable[None]] | None = None,
                       repeated: bool = False) -> None:
        """Fill in the chunk's `prompts`, `rollout` and `generator`; when a worker is lost, another one samples the
        chunk. If it is cancelled, the worker's call ends first, and so do the requests of its episodes.

        Args:
            again: awaited before each further attempt, with the error that ended the last one.
            repeated: its rollout was lost.

        Raises:
            WorkerLost: an argument of the call is lost, and must be produced again.
            WorkerError: no generator or episode runner can be kept alive.
            RLHFError: the error of the prompt reader, the generator or the episode runner.
        """
        chunk.prompts = await self._prompts.read_for(chunk.keys)
        samples = len(chunk.keys)
        while True:
            try:
                call = await self._attempt(chunk, repeated)
                break
            except WorkerLost as error:
                if self._dispatcher.lost(error, samples) is not Decision.RETRY:
                    raise
                repeated = True
                if again is not None:
                    await again(error)
        chunk.rollout = call.ref
        chunk.generator = call.worker

    async def _attempt(self, chunk: Chunk, repeated: bool) -> Call[Any]:
        samples = len(chunk.keys)
        if self._episodes is None:
            return await self._generators.attempt(
                Generator.generate, chunk.prompts, chunk.keys, self._seed, self._sampling,
                phase="generate", work=samples, ends_with_caller=True)
        return await self._episodes.runners.attempt(
            EpisodeRunner.play, chunk.prompts, chunk.keys, self._seed, self._sampling, self._episodes.held_out,
            self._episodes.place(repeated),
            phase="episodes", work=samples, deadline=self._episodes.deadline, ends_with_caller=True)


@dataclass(frozen=True)
class EpisodeSource:
    """Who plays episodes."""

    runners: WorkerDispatcher[EpisodeRunner]
    deadline: Deadline
    """Of the episodes of a chunk, those that wait for others included."""
    held_out: bool = False
    """See `EpisodeRunner.play`."""
    journals: EpisodeJournals | None = None
    """None: what they play is not recorded."""

    @classmethod
    def of(cls, config: PPOConfig, roles: RoleGroups, held_out: bool = False,
           journals: EpisodeJournals | None = None) -> "EpisodeSource | None":
        """Those of a run; None if it has no environments."""
        if roles.runners is None:
            return None
        return cls(roles.dispatcher(roles.runners), Deadline(episodes_deadline_s(config), "environments.*.timeout_s"),
                   held_out, journals)

    def place(self, repeated: bool) -> JournalPlace | None:
        """Where a call records its episodes; `repeated` as in `EpisodeJournals.place`."""
        return None if self.journals is None else self.journals.place(repeated, self.held_out)


def chunks_at_a_time(config: GenerationConfig, generators: int) -> int:
    """How many chunks so many generators sample concurrently. Deadlines run from a call on, so further chunks must
    wait before their calls."""
    return generators * (config.samples_in_flight // config.chunk)
