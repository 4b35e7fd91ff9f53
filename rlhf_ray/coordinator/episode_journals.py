"""The journals of a run's episodes, as the driver keeps them: a directory for each attempt at the run, what a run that
continues takes over, and when records are not needed any more. Their format is `roles.episode_journal`'s."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rlhf_ray.coordinator.run_state import RunState
from rlhf_ray.errors import RLHFError
from rlhf_ray.files.writer_thread import FileThread
from rlhf_ray.files.writing import write_atomically
from rlhf_ray.records import SampleKey
from rlhf_ray.roles.episode_journal import (
    SUFFIX,
    TRAINING,
    Entry,
    JournalPlace,
    JournalReader,
    Needed,
    last_attempt,
    longest,
    write_frames,
)
from rlhf_ray.roles.episode_runner import EpisodeRunner
from rlhf_ray.workers.calls import Deadline
from rlhf_ray.workers.worker_group import WorkerGroup

ADOPTED = f"adopted{SUFFIX}"
FACTS = "facts.json"
FORGET_S = 30.0
"""Deadline of a runner's forgetting, which rewrites a file at most. One that is late is asked again after a step."""


class Adopted(NamedTuple):
    """What a run that continues takes over from journals."""

    episodes: int
    """That go on, or had ended."""
    turns: int
    """Of them."""
    discarded: int
    """Turns that are played again, because a newer policy sampled them than the one that the run continues with."""


def adopt(files: Iterable[Path], target: Path, version: int, oldest: int) -> Adopted:
    """Copy the episodes of training that a run goes on with into a new file.

    A turn is usable if the policy that the run continues with, or an earlier one, sampled it and all turns before it.
    An episode that failed is played again: its environment may have been put right.

    Args:
        version: of that policy.
        oldest: see `JournalPlace`.
    """
    attempts: dict[SampleKey, list[list[Entry]]] = {}
    discarded = 0
    for path in files:
        reader = JournalReader(path)
        reader.refresh()
        for (scope, key), entries in reader.entries.items():
            last = last_attempt(entries)
            if scope == TRAINING and last and not last[-1].failed:
                newer = next((i for i, entry in enumerate(last) if max(entry.newest, entry.version) > version),
                             len(last))
                discarded += sum(entry.kind == "turn" for entry in last[newer:])
                attempts.setdefault(key, []).append(last[:newer])
    chosen = [best for candidates in attempts.values() if (best := longest(candidates, oldest))]
    if chosen:
        os.close(write_frames(target, (entry.read() for entries in chosen for entry in entries)))
    return Adopted(len(chosen), sum(entry.kind == "turn" for entries in chosen for entry in entries), discarded)


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
                 files: FileThread, note: Callable[[str], None], term: int = 0) -> None:
        """
        Args:
            root: their directory in the run's.
            kind: what episodes must have in common to go on with each other's turns (`config.derived.episode_kind`).
            term: in which this driver owns the run. Journals of a later one are another driver's.
        """
        self._root = root
        self._runners = runners
        self._state = state
        self._max_staleness = max_staleness
        self._kind = kind
        self._files = files
        self._note = note
        self._term = term
        self._directory = self._new_directory()
        self._adopted_until = -1
        """Version of the last policy that may train on episodes that were taken over."""
        self._left: dict[str, int] = {}
        """Files that no runner writes any more, and the version at which that was noticed first."""
        self._forgetting: asyncio.Task[None] | None = None

    async def begin(self, continues: bool) -> None:
        """Begin the attempt, with the policy of the state.

        Args:
            continues: from a checkpoint; otherwise what journals there are is removed.
        """
        adopted = await self._files.run(self._begin, self._state.step, continues)
        self._adopted_until = self._state.step + self._max_staleness if adopted.episodes else -1
        self._left = {ADOPTED: self._state.step}
        if adopted.episodes or adopted.discarded:
            discarded = f"; {adopted.discarded} turns of newer policies are played again" if adopted.discarded else ""
            self._note(f"{adopted.episodes} episodes go on from their journals, after {adopted.turns} turns"
                       f"{discarded}")

    def place(self, repeated: bool = False, evaluation: bool = False) -> JournalPlace:
        """Where a call that is made now records its episodes.

        Args:
            repeated: they were played before, and their runner or their rollout was lost.
            evaluation: they are of an evaluation, and may have the keys of others.
        """
        version = self._state.published
        # An update counts as soon as it is made: what the buffer would refuse then is not taken over again.
        oldest = version if evaluation else self._state.step - self._max_staleness
        return JournalPlace(str(self._directory.absolute()), version, oldest,
                            evaluation_of(version) if evaluation else TRAINING,
                            repeated or version <= self._adopted_until)

    async def step_over(self, committed: int) -> None:
        """A step is over: forget, beside other work, what is not needed any more.

        Args:
            committed: step of the newest checkpoint; -1 without one.
        """
        if self._forgetting is not None and not self._forgetting.done():
            return  # a runner is late; more can be forgotten after the next step
        await self.close()
        version = self._state.published
        needed = Needed(version, committed, self._max_staleness, evaluation_of(version))
        self._forgetting = asyncio.create_task(self._forget(needed), name="forget episodes")

    async def discard(self) -> None:
        """Take nothing over from what was recorded so far: it was sampled with damaged weights."""
        await self.close()
        self._directory = self._new_directory()
        await self.begin(continues=False)

    async def close(self) -> None:
        """End the forgetting that is under way."""
        if self._forgetting is not None:
            forgetting, self._forgetting = self._forgetting, None
            forgetting.cancel()
            await asyncio.gather(forgetting, return_exceptions=True)

    async def end(self) -> None:
        """The run is complete: remove all journals."""
        await self.close()
        await self._files.run(lambda: self._remove_former(self._former()))

    def _new_directory(self) -> Path:
        return self._root / f"{self._term:04}-{secrets.token_hex(4)}"

    def _former(self) -> list[Path]:
        """Directories of this driver and earlier ones."""
        found = []
        for path in self._root.glob("*-*"):
            with suppress(ValueError):
                if int(path.name.partition("-")[0]) <= self._term:
                    found.append(path)
        return found

    def _remove_former(self, former: Iterable[Path]) -> None:
        for path in former:
            shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):  # there is another driver's
            self._root.rmdir()

    def _begin(self, version: int, continues: bool) -> Adopted:
        adopted = Adopted(0, 0, 0)
        former = self._former()
        try:
            self._directory.mkdir(parents=True)
            if continues:
                files = [file for each in self._unreplaced(former) for file in each.glob(f"*{SUFFIX}")]
                adopted = adopt(files, self._directory / ADOPTED, version, version - self._max_staleness)
            # Only now: the former ones count until all that is taken over is here.
            write_atomically(self._directory / FACTS, json.dumps([self._kind, [each.name for each in former]]).encode())
        except OSError as error:
            self._note(f"episodes begin again, because their journals in {self._root} cannot be read or written: "
                       f"{error}")
        self._remove_former(former)
        return adopted

    def _unreplaced(self, former: Sequence[Path]) -> list[Path]:
        """The directories of this kind that no later attempt has replaced. One that could not be removed then has turns
        of policies that are not this run's any more."""
        known = {path: _facts_of(path) for path in former}
        replaced = {name for _, names in known.values() for name in names}
        return [path for path, (kind, _) in known.items() if kind == self._kind and path.name not in replaced]

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


def evaluation_of(version: int) -> str:
    """Scope of the evaluation of a version."""
    return f"evaluation of version {version}"


def _facts_of(directory: Path) -> tuple[str, list[str]]:
    """Kind of the episodes in a directory, and names of those that it replaced; nothing if it does not say."""
    try:
        kind, names = json.loads((directory / FACTS).read_bytes())
        return str(kind), list(map(str, names))
    except (OSError, TypeError, ValueError):
        return "", []


def _remove(file: Path) -> None:
    with suppress(OSError):
        file.unlink()


def _others(directory: Path, used: Collection[str]) -> list[str]:
    """Journals that none of these is."""
    return [file.name for file in directory.glob(f"*{SUFFIX}") if file.name not in used]
