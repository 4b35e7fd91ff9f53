"""Checkpoints of a whole run: the parts of all learner ranks, the coordinator's state, the ledger, ready experience."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_ray.checkpoint.state_files import check_complete, encoded_state, load_state
from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.coordinator.run_state import RunState
from rlhf_ray.errors import (
    BufferError,
    CheckpointError,
    ClusterError,
    ConfigError,
    DiskStalled,
    LedgerError,
    SupersededError,
    WeightsError,
    WorkerError,
    WorkerLost,
    first_line,
)
from rlhf_ray.failpoints import reached
from rlhf_ray.files.writer_thread import ProgressDeadline, RunFiles
from rlhf_ray.observability.progress import StageProgress
from rlhf_ray.records import ExperienceSummary, SampleKey
from rlhf_ray.replay.buffer import ReplayBuffer
from rlhf_ray.replay.chunk import Chunk
from rlhf_ray.replay.ledger import Ledger
from rlhf_ray.roles.assembler import Assembler
from rlhf_ray.roles.learner import Learner
from rlhf_ray.workers.role_groups import RoleGroups
from rlhf_ray.workers.worker_group import WorkerGroup

LEDGER = "ledger.sqlite"
"""Name of the ledger's copy in a checkpoint."""
STATE = "coordinator.json"
POLL_S = 0.1
"""Between two checks whether the parts of a checkpoint are written."""
NOT_SAVED = (BufferError, CheckpointError, ClusterError, DiskStalled, LedgerError, OSError, SupersededError,
             WeightsError, WorkerError)
"""Errors that leave nothing to save, or nowhere to save it: disk or cluster fail, another driver owns the directory,
ledger, buffer or weights are not as they should be, or a worker's state is lost with it."""
PERIODS = 20
"""A checkpoint by time is due after so many times what the last one took."""
Geometry = Mapping[str, int | str | list[str]]
"""What must be the same when the run resumes, by field: values of its configuration, and digests of its models."""


class UnderWay(NamedTuple):
    """A checkpoint that is being written."""

    step: int
    began: float
    """By `time.monotonic`."""


class SavePace:
    """When a checkpoint is due by time: `every_minutes` after the beginning of the last one (whatever its reason) or of
    the run, but not before `PERIODS` times what the last one took from its copy to its last written byte."""

    def __init__(self, every_minutes: float, now: Callable[[], float] = time.monotonic) -> None:
        """`every_minutes`: `checkpoint.every_minutes`; 0 is never."""
        self._every_s = 60 * every_minutes
        self._now = now
        self._began = now()
        self._took_s: float | None = 0.0
        """None while a checkpoint is under way."""

    @property
    def due(self) -> bool:
        """Whether one is due now; not while one is under way."""
        if not self._every_s or self._took_s is None:
            return False
        return self._now() - self._began >= max(self._every_s, PERIODS * self._took_s)

    def begin(self) -> None:
        """A checkpoint begins."""
        self._began = self._now()
        self._took_s = None

    def end(self) -> None:
        """It is complete."""
        self._took_s = self._now() - self._began


class Recovery:
    """Saves a run between two steps and restores it. One checkpoint is under way at a time.

    Its files are written by the thread for checkpoints, so that a slow or hanging disk blocks no other work; if it
    makes no progress for too long, the run ends with `DiskStalled`.
    """

    def __init__(self, store: CheckpointStore, roles: RoleGroups, state: RunState, buffer: ReplayBuffer,
                 geometry: Geometry, ledger: Ledger, experience: Mapping[str, str] | None = None,
                 files: RunFiles | None = None, pace: SavePace | None = None) -> None:
        """
        Args:
            geometry: of this run's configuration.
            experience: how it is made (`config.derived.experience_kind`). If that has changed when the run resumes,
                ready experience is generated again.
            pace: is told of each checkpoint's beginning and end.
        """
        self._pace = pace or SavePace(0)
        self.geometry = geometry
        self.experience = dict(experience or {})
        self.store = store
        self.roles = roles
        self.state = state
        self.buffer = buffer
        self.ledger = ledger
        self.files = files or RunFiles()
        self.longest_pause_s = 0.0
        """The longest pause that `save` returned."""
        self.writing: UnderWay | None = None
        """The checkpoint that is being written; None between two."""
        self.committed = -1
        """Step of the newest complete checkpoint; -1 without one."""
        self._under_way: asyncio.Task[None] | None = None

    async def save(self) -> float:
        """Start the checkpoint of the present step, after the previous one is complete: all state is copied now, and
        training may continue while it is written.

        Returns:
            seconds for which training paused.

        Raises:
            CheckpointError: the disk is full or cannot be written; the previous checkpoint is intact.
            DiskStalled: it hangs.
        """
        began = time.perf_counter()
        await self.settled()
        step = self.state.step
        self.writing = UnderWay(self.state.step, time.monotonic())
        self._pace.begin()
        try:
            directory = await self.files.checkpoints.run(self.store.begin, step)
            async with whole_or_nothing(self.files, self.store, directory, step):
                waiting = self.buffer.ready()
                copy = self.ledger.save(directory / LEDGER)  # as of now, like the snapshot
                snapshot = encoded_state({
                    "geometry": dict(self.geometry), "run": self.state.state_dict(self.buffer.under_way()),
                    "buffer": self.buffer.state_dict(),
                    "summaries": [[chunk.place.plain(), vars(chunk.summary)] for chunk in waiting],
                    "experience": self.experience,
                })
                await asyncio.gather(*(group.values(Learner.begin_save, str(directory.absolute() / group.role))
                                       for group in self.roles.learners()))
        except BaseException:
            self.writing = None
            raise
        reached("checkpoint_copied")
        self._under_way = asyncio.create_task(self._finish(directory, step, copy, snapshot, waiting),
                                              name=f"checkpoint of step {step}")
        pause_s = time.perf_counter() - began
        self.longest_pause_s = max(self.longest_pause_s, pause_s)
        return pause_s

    async def settled(self, wait: bool = True) -> None:
        """Wait until the checkpoint under way, if there is one, is complete.

        Args:
            wait: False raises its error if it has failed already, without waiting.

        Raises:
            CheckpointError, DiskStalled: as `save`.
        """
        if self._under_way is not None and (wait or self._under_way.done()):
            under_way, self._under_way = self._under_way, None
            await under_way

    async def close(self, patience_s: float | None = None) -> None:
        """Wait for the end of the checkpoint under way, successful or not; or abandon it after `patience_s`."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            if patience_s is not None:
                await asyncio.wait([under_way], timeout=patience_s)
                if under_way.cancel():
                    self.files.checkpoints.interrupt()
            await asyncio.gather(under_way, return_exceptions=True)
            if under_way.cancelled():  # perhaps before it started
                self.writing = None
                with suppress(DiskStalled, OSError):
                    await self.files.checkpoints.run(self.store.clean)

    async def _finish(self, directory: Path, step: int, copy: Future[None], snapshot: bytes,
                      waiting: Sequence[Chunk]) -> None:
        """Wait until all parts are on disk, and commit the checkpoint. The ledger follows."""
        files = self.files
        try:
            async with whole_or_nothing(self.files, self.store, directory, step):
                await files.records.wait(copy)
                await files.checkpoints.run((directory / STATE).write_bytes, snapshot)
                for chunk in waiting:
                    await self._write_experience(directory.absolute() / f"experience_{chunk.place}.npz", chunk)
                await parts_on_disk(self.roles.learners(), files.checkpoints.timeout_s)
            await files.checkpoints.run(self.store.commit, directory, step)
            self.committed = step
            self._pace.end()
        finally:
            self.writing = None
        reached("checkpoint_uncommitted")
        self.ledger.mark_committed(step)
        await self.ledger.settled()

    async def _write_experience(self, path: Path, chunk: Chunk) -> None:
        """Have an assembler write ready experience.

        Raises:
            WorkerLost: the experience was lost with a node. The update that needs it would fail as well, so the error
                is the one that the update would raise.
        """
        try:
            await self.roles.dispatcher(self.roles.assembler).call(Assembler.save, str(path), chunk.experience)
        except WorkerLost as error:
            if error.kind != "result":
                raise
            policy = self.roles.policy
            raise WorkerLost(f"experience that waits for {policy.role} is lost: {first_line(error)}", policy.role, 0,
                             policy.incarnation(0), error.method, error.kind, error.age_s) from error

    async def restore(self, directory: Path) -> None:
        """Restore workers, state and buffer from a verified checkpoint; `Pipeline.resume` starts its chunks again.

        Raises:
            CheckpointError: it is of another version, or of other data.
            ConfigError: it is of another configuration.
        """
        saved = load_state(directory / STATE)
        check_complete(saved, ("geometry", "run", "buffer", "summaries", "experience"), str(directory))
        check_geometry(directory, self.geometry, saved["geometry"])
        await asyncio.gather(*(group.values(Learner.load, str(directory.absolute() / group.role))
                               for group in self.roles.learners()))
        dropped: list[SampleKey] = []
        if changed := [(saved["experience"][aspect], now) for aspect, now in self.experience.items()
                       if saved["experience"][aspect] != now]:
            former, now = (" and ".join(words) for words in zip(*changed, strict=True))
            dropped = self._drop_waiting(saved, f"made with {former}, and the run resumed with {now}")
        experiences = {}
        for chunk in saved["buffer"]["ready"]:
            path = directory.absolute() / f"experience_{chunk['order']}.npz"
            call = await self.roles.dispatcher(self.roles.assembler).call(Assembler.load, str(path))
            experiences[chunk["order"]] = call.ref
        summaries = {order: ExperienceSummary(**summary) for order, summary in saved["summaries"]}
        under_way = self.buffer.load_state_dict(saved["buffer"], experiences, summaries)
        self.state.load_state_dict(saved["run"], under_way)
        self.state.returned[:0] = dropped
        self.committed = self.state.step

    def _drop_waiting(self, saved: dict[str, Any], reason: str) -> list[SampleKey]:
        """Give up ready experience; returns its samples, to be admitted again."""
        keys = [SampleKey(*key) for chunk in saved["buffer"]["ready"] for key in chunk["keys"]]
        saved["buffer"]["ready"] = []
        saved["summaries"] = []
        self.ledger.give_up(keys, reason)
        return keys


@asynccontextmanager
async def whole_or_nothing(files: RunFiles, store: CheckpointStore, directory: Path, step: int) -> AsyncIterator[None]:
    """`CheckpointStore.whole_or_nothing`, in the thread for checkpoints."""
    try:
        yield
    except BaseException as error:
        with suppress(DiskStalled):  # leftovers are removed when the run resumes
            reported = await files.checkpoints.run(store.discard, directory, step, error)
            if reported is not error:
                raise reported from error
        raise


@asynccontextmanager
async def reported(step: int, progress: StageProgress) -> AsyncIterator[None]:
    """Save `step` because an error ends the run: that error is the one to be raised, so one of the saving is only
    reported."""
    try:
        yield
    except Exception as failure:
        progress.warn(f"an error ends the run, and step {step} cannot be saved: {first_line(failure)}")
    else:
        progress.note(f"an error ends the run; step {step} is saved, and --resume continues from it")


async def parts_on_disk(groups: Iterable[WorkerGroup], timeout_s: float) -> None:
    """Wait until all ranks have written the files of `begin_save`; other calls may run in between.

    Raises:
        DiskStalled: no rank of a group has made progress for `timeout_s`.
    """
    await asyncio.gather(*(_on_disk(group, timeout_s) for group in groups))


async def _on_disk(group: WorkerGroup[Learner], timeout_s: float) -> None:
    deadline = ProgressDeadline(timeout_s, asyncio.get_running_loop().time)
    while True:
        parts = await group.values(Learner.save_progress)
        late = [(rank, part) for rank, part in enumerate(parts) if not part.done]
        if not late:
            return
        deadline.check([(rank, part.moved) for rank, part in late],
                      ", ".join(f"{group.role}/{rank}: {part.doing}" for rank, part in late))
        await asyncio.sleep(POLL_S)


def check_geometry(directory: Path, wanted: Geometry, saved: Geometry) -> None:
    """Check that what a run depends on, and its checkpoint does not contain, is the same: settings, frozen models,
    adapters. Lists of settings match if both or neither have any.

    Raises:
        ConfigError: fields of the configuration differ; names them.
    """
    check_complete(saved, wanted, f"the geometry of {directory}")
    other = [f"{name} was {_shown(saved[name])} and is {_shown(value)}" for name, value in wanted.items()
             if (bool(saved[name]) != bool(value) if isinstance(value, list) else saved[name] != value)]
    if other:
        raise ConfigError(f"{directory} cannot be resumed with another configuration: {'; '.join(other)}. Set these "
                          "back (restore a model that was replaced), or start a new run in another run.dir")


def _shown(value: int | str | list[str] | None) -> str:
    return (", ".join(value) or "nothing") if isinstance(value, list) else str(value)
