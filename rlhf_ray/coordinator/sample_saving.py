"""Samples of each batch on disk: an assembler writes them while the policy learns from the batch."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from rlhf_ray.coordinator.rollout_source import PromptSource
from rlhf_ray.errors import WorkerLost, first_line
from rlhf_ray.observability.owner_record import Term
from rlhf_ray.replay.chunk import Chunk, Lease
from rlhf_ray.roles.assembler import Assembler
from rlhf_ray.workers.role_groups import RoleGroups

PATIENCE_S = 5.0
"""Time for the write under way when the run ends with an error."""


class SampleSaving:
    """Has the samples of a run written, one step at a time and in order.

    Only references and the small numbers of the summaries pass through this process.
    """

    def __init__(self, saved: Literal["all", "off"] | int, roles: RoleGroups, prompts: PromptSource, directory: Path,
                 term: Term | None, old_known: bool, warn: Callable[[str], None]) -> None:
        """
        Args:
            saved: `logging.samples`.
            directory: samples/ of the run.
            old_known: whether a learner computes the old log-probabilities of a batch before the update.
        """
        self._saved = saved
        self._roles = roles
        self._prompts = prompts
        self._directory = directory
        self._term = term
        self._old_known = old_known
        self._warn = warn
        self._under_way: list[asyncio.Task[dict[str, float]]] = []

    def begin(self, step: int, lease: Lease) -> asyncio.Task[dict[str, float]]:
        """Start to write the samples of a batch; returns the task that waits for the end. It returns metrics: the
        size of the file and the seconds that it took, in the assembler.

        The task raises:
            DiskStalled: the disk hangs.
            CheckpointError: it is full.
            SupersededError: another driver owns the run now.
            WorkerError: the assemblers cannot be kept alive.
        """
        before = self._under_way[-1:]
        task = asyncio.create_task(self._save(step, lease, before), name=f"samples of step {step}")
        self._under_way = [*before, task]
        return task

    async def close(self) -> None:
        """Wait a little for the writes under way, and cancel the waiting for them after that."""
        under_way, self._under_way = self._under_way, []
        if under_way:
            await asyncio.wait(under_way, timeout=PATIENCE_S)
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _save(self, step: int, lease: Lease, before: list[asyncio.Task[dict[str, float]]]) -> dict[str, float]:
        if self._saved == "off":
            return {}
        if before:
            await asyncio.wait(before)
        limit = None if self._saved == "all" else self._saved
        chunks = _with_first_prompts(lease.chunks, limit)
        try:
            prompts = await self._prompts.read_for(key for chunk in chunks for key in chunk.keys)
            size, seconds = await self._roles.dispatcher(self._roles.assembler).value(
                Assembler.save_samples, str(self._directory.absolute()), self._term, step, limit, self._old_known,
                [chunk.summary for chunk in chunks], prompts, experiences=[chunk.experience for chunk in chunks])
        except WorkerLost as error:
            self._warn(f"the samples of step {step} are not in {self._directory.name}/: {first_line(error)}")
            return {}
        return {"samples/bytes": float(size), "samples/write_s": seconds}


def _with_first_prompts(chunks: tuple[Chunk, ...], limit: int | None) -> list[Chunk]:
    """The first chunks that have all samples of the first `limit` prompts."""
    prompts: set[tuple[int, int]] = set()
    chosen: list[Chunk] = []
    for chunk in chunks:
        if limit is not None and len(prompts) >= limit:
            break
        chosen.append(chunk)
        prompts.update((key.epoch, key.row) for key in chunk.keys)
    return chosen
