"""The journals of a run's episodes, as the driver keeps them: a directory for each attempt at the run, what a run that
continues takes over, and when records are not needed any more. Their format is `roles.episode_journal`'s."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from rlhf_ray.coordinator.run_state import RunState
from rlhf_ray.errors import RLHFError
from rlhf_ray.files.writer_thread import FileThread
from rlhf_ray.roles.episode_journal import SUFFIX, TRAINING, Adopted, JournalPlace, Needed, adopt
from rlhf_ray.roles.episode_runner import EpisodeRunner
from rlhf_ray.workers.calls import Deadline
from rlhf_ray.workers.worker_group import WorkerGroup

ADOPTED = f"adopted{SUFFIX}"
KIND = "kind"
FORGET_S = 30.0
"""Deadline of a runner's forgetting, which rewrites a file at most. One that is late is asked again after a step."""


class EpisodeJournals:
    """The journals of one attempt at a run.

    Example:
        journals = EpisodeJournals(run.episodes, roles.runners, state, 0, kind, files.records, progress.note)
        await journals.begin(continues=True)
        place = journals.place()  # goes with each call to a runner
        await journals.step_over(committed=12)
        await journals.end()
    """

    def __init__(self, root: Path, runners: WorkerGroup[EpisodeRunner], state: RunState, max_staleness: int, kind: str,
                 files: FileThread, note: Callable[[str], None]) -> None:
        """
        Args:
            root: their directory in the run's.
            kind: what episodes must have in common to go on with each other's turns (`config.derived.episode_kind`).
        """
        self._root = root
        self._runners = runners
        self._state = state
        self._max_staleness = max_staleness
        self._kind = kind
        self._files = files
        self._note = note
        self._directory = root / secrets.token_hex(4)
        self._adopted = False
        self._left: dict[str, int] = {}
        """Files that no runner writes any more, and the version at which that was noticed first."""
        self._forgetting: asyncio.Task[None] | None = None

    async def begin(self, continues: bool) -> None:
        """Begin the attempt, with the policy of the state.

        Args:
            continues: from a checkpoint; otherwise what journals there are is removed.
        """
        adopted = await self._files.run(self._begin, self._state.step, continues)
        self._adopted = adopted.episodes > 0
        self._left = {ADOPTED: self._state.step}
        if adopted.episodes or adopted.discarded:
            discarded = f"; {adopted.discarded} turns of newer policies are played again" if adopted.discarded else ""
            self._note(f"{adopted.episodes} episodes go on from their journals, after {adopted.turns} turns"
                       f"{discarded}")

    def place(self, again: bool = False, evaluation: bool = False) -> JournalPlace:
        """Where a call that is made now records its episodes.

        Args:
            again: a runner was lost that may have played some of them.
            evaluation: they are of an evaluation, and may have the keys of others.
        """
        version = self._state.published
        return JournalPlace(str(self._directory.absolute()), version,
                            version if evaluation else version - self._max_staleness,
                            evaluation_of(version) if evaluation else TRAINING, again or self._adopted)

    async def step_over(self, committed: int) -> None:
        """A step is over: forget, beside other work, what is not needed any more.

        Args:
            committed: step of the newest checkpoint; -1 without one.
        """
        await self._settled()
        version = self._state.published
        needed = Needed(version, committed, self._max_staleness, evaluation_of(version))
        self._forgetting = asyncio.create_task(self._forget(needed), name="forget episodes")

    async def discard(self) -> None:
        """Take nothing over from what was recorded so far: it was sampled with damaged weights."""
        await self._settled()
        self._directory = self._root / secrets.token_hex(4)
        await self.begin(continues=False)

    async def close(self) -> None:
        """The attempt is over."""
        if self._forgetting is not None:
            self._forgetting.cancel()
            await asyncio.gather(self._forgetting, return_exceptions=True)

    async def end(self) -> None:
        """The run is complete: remove all journals."""
        await self.close()
        await self._files.run(shutil.rmtree, self._root, True)

    def _begin(self, version: int, continues: bool) -> Adopted:
        adopted = Adopted(0, 0, 0)
        former = [each for each in self._root.glob("*") if each.is_dir()]
        try:
            self._directory.mkdir(parents=True)
            (self._directory / KIND).write_text(self._kind)
            if continues:
                files = [file for each in former if _kind_of(each) == self._kind for file in each.glob(f"*{SUFFIX}")]
                adopted = adopt(files, self._directory / ADOPTED, version, version - self._max_staleness)
        except OSError as error:
            self._note(f"episodes begin again, because their journals in {self._root} cannot be read or written: "
                       f"{error}")
        for each in former:
            shutil.rmtree(each, ignore_errors=True)
        return adopted

    async def _forget(self, needed: Needed) -> None:
        """Let every runner forget, and remove the files of those that are gone, once nothing can be trained on that
        they have played."""
        used = await asyncio.gather(*(self._forget_at(rank, needed) for rank in self._runners.ranks))
        if None in used:  # it is being replaced, and its file may not be known
            return
        directory = self._directory
        left = await self._files.run(_others, directory, {name for name in used if name})
        self._left = {name: self._left.get(name, needed.version) for name in left}
        for name, version in self._left.items():
            if needed.committed > version + self._max_staleness:
                await self._files.run(_remove, directory / name)

    async def _forget_at(self, rank: int, needed: Needed) -> str | None:
        with suppress(RLHFError):
            return await self._runners.call(rank, EpisodeRunner.forget, str(self._directory.absolute()), needed,
                                            deadline=Deadline(FORGET_S)).value()
        return None

    async def _settled(self) -> None:
        if self._forgetting is not None:
            forgetting, self._forgetting = self._forgetting, None
            await forgetting


def evaluation_of(version: int) -> str:
    """Scope of the evaluation of a version."""
    return f"evaluation of version {version}"


def _kind_of(directory: Path) -> str | None:
    try:
        return (directory / KIND).read_text()
    except OSError:
        return None


def _remove(file: Path) -> None:
    with suppress(OSError):
        file.unlink()


def _others(directory: Path, used: Collection[str]) -> list[str]:
    """Journals that none of these is."""
    return [file.name for file in directory.glob(f"*{SUFFIX}") if file.name not in used]
