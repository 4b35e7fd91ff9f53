"""What is recorded of an episode while it is played, and its environment as far as a record has its answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from rlhf_ray.environments.open_episode import Played
from rlhf_ray.environments.pool import EnvironmentPool, OpenEnvironment
from rlhf_ray.environments.protocol import Reply, Step
from rlhf_ray.errors import EpisodeFailed, ReplayDiverged
from rlhf_ray.records import SampleKey
from rlhf_ray.roles.engines.interface import Completion
from rlhf_ray.roles.episode_journal import (
    Frame,
    Journal,
    JournalPlace,
    RecordedEpisode,
    RecordedOutcome,
    RecordedStart,
    RecordedTurn,
    digest,
    reset_frame,
)


class RecordMisfit(Exception):
    """An episode cannot go on from its record. It begins again."""


class EpisodeRecord:
    """The records of one episode, as they are made. Without a journal none are.

    Example:
        record = EpisodeRecord(journal, place, key)
        recorded = await record.find()  # another process may have played it up to here
        await record.begin(recorded)
        record.sampled(context, completion)
        await record.answered(step)
        await record.ended(outcome)
    """

    def __init__(self, journal: Journal | None, place: JournalPlace | None, key: SampleKey) -> None:
        self.began = asyncio.get_running_loop().time()
        """When it would have begun in this process, in the event loop's time, had it always been played here."""
        self._journal = journal
        self._place = place
        self._key = key
        self._unanswered: RecordedTurn | None = None

    @property
    def age_s(self) -> float:
        """Seconds that it has been played for, in all processes."""
        return asyncio.get_running_loop().time() - self.began

    async def find(self) -> RecordedEpisode:
        """What another process has recorded of it, or that it begins."""
        found = None
        if self._journal is not None and self._place is not None and self._place.look:
            found = await self._journal.find(self._place.scope, self._key, self._place.oldest)
        if found is None:
            return RecordedEpisode(self._start(0, {}))
        self.began -= found.age_s
        if found.outcome is not None:
            return found
        events = Counter(found.start.events)
        if not found.turns:  # nothing was sampled, so nothing binds it to how it began there
            return RecordedEpisode(self._start(found.start.attempt, events))
        events += Counter(continued=1, interrupted=found.turns[-1].interrupted)
        turns = [replace(turn, interrupted=0) for turn in found.turns]
        return replace(found, start=replace(found.start, events=dict(events)), turns=turns)

    def again(self, recorded: RecordedEpisode, **events: int) -> RecordedEpisode:
        """The attempt after this one, with what happened in this one."""
        start = recorded.start
        return RecordedEpisode(self._start(start.attempt + 1, Counter(start.events) + Counter(events)))

    def _start(self, attempt: int, events: Mapping[str, int]) -> RecordedStart:
        return RecordedStart(attempt, 0 if self._place is None else self._place.version, dict(events), self.age_s)

    async def begin(self, recorded: RecordedEpisode) -> None:
        """Record how an attempt begins, with what is taken over from another process."""
        self._unanswered = None
        if self._place is not None:
            await self._append(*recorded.frames(self._place.scope, self._key))

    async def reset(self, answer: dict[str, Any]) -> None:
        """Record the environment's answer to reset, as in `RecordedEpisode.reset`."""
        if self._place is not None:
            await self._append(reset_frame(answer, self._place.scope, self._key))

    def sampled(self, context: Sequence[int], completion: Completion) -> None:
        """A turn was sampled after these tokens. It is recorded with its answer."""
        if self._journal is not None:
            self._unanswered = RecordedTurn(digest(context), completion, None)

    async def answered(self, step: Step, snapshot: Any, interrupted: int) -> None:
        """Record the sampled turn, unless it was taken over.

        Args:
            step: what followed.
            snapshot: see `RecordedTurn`, as of `interrupted`.
        """
        if self._unanswered is not None:
            turn = replace(self._unanswered, answer=_fields(step), snapshot=snapshot, interrupted=interrupted)
            self._unanswered = None
            await self._append(self._frame(turn))

    async def asked(self, turn: RecordedTurn) -> None:
        """Record a turn of an agent, before it is answered."""
        if self._place is not None:
            await self._append(self._frame(turn))

    async def ended(self, outcome: RecordedOutcome) -> None:
        """Record how it ended, together with a turn that nothing followed."""
        if self._place is not None:
            last = [] if self._unanswered is None else [self._frame(self._unanswered)]
            self._unanswered = None
            await self._append(*last, outcome.frame(self._place.scope, self._key))

    def _frame(self, turn: RecordedTurn) -> Frame:
        assert self._place is not None
        return replace(turn, age_s=self.age_s).frame(self._place.scope, self._key)

    async def _append(self, *frames: Frame) -> None:
        assert self._journal is not None
        await self._journal.append(*frames)


class AttemptEnvironment:
    """The environment of an attempt. What is recorded is answered from the record; what is asked beyond it opens the
    environment and brings it to where it was."""

    def __init__(self, pool: EnvironmentPool, row: dict[str, Any], seed: int, record: EpisodeRecord,
                 recorded: RecordedEpisode) -> None:
        """
        Args:
            row: the columns of the prompt's row.
            seed: of the environment.
        """
        self._pool = pool
        self._row = row
        self._seed = seed
        self._record = record
        self._recorded = recorded
        self._steps: list[tuple[Reply, dict[str, Any]]] = []
        """That were answered from the record."""
        self._snapshot: Any = (recorded.reset or {}).get("snapshot")
        self._open: OpenEnvironment | None = None

    @property
    def interrupted(self) -> int:
        """See `OpenEnvironment`; in this process."""
        return 0 if self._open is None else self._open.interrupted

    @property
    def snapshot(self) -> Any:
        """See `OpenEnvironment`."""
        return self._snapshot if self._open is None else self._open.snapshot

    async def start(self) -> dict[str, Any]:
        """The answer to reset, as in `RecordedEpisode.reset`. Raises as `open`."""
        if self._recorded.reset is not None:
            return self._recorded.reset
        environment = await self.open()
        answer = {**_fields(environment.start), "observation": environment.observation,
                  "snapshot": environment.snapshot}
        await self._record.reset(answer)
        return answer

    async def open(self) -> OpenEnvironment:
        """The environment itself, opened when this is called first.

        Raises:
            EpisodeFailed: it cannot be opened; or, in an episode that has ended, how it ended.
            RecordMisfit: it cannot be brought to where it was.
        """
        if self._open is None:
            outcome = self._recorded.outcome
            if outcome is not None:
                raise EpisodeFailed(cast(Any, outcome.cause), outcome.error)
            played = None
            if self._recorded.reset is not None:
                played = Played(self._recorded.reset, self._steps, self._snapshot)
            try:
                self._open = await self._pool.open(self._row, self._seed, played=played)
            except ReplayDiverged as error:
                if played is None:
                    raise
                raise RecordMisfit(str(error)) from error
        return self._open

    async def step(self, reply: Reply, recorded: RecordedTurn | None) -> Step:
        """How it answers a turn, of which there may be a record. Raises as `open`, and as `OpenEnvironment.step`."""
        if recorded is None or recorded.answer is None:
            return await (await self.open()).step(reply)
        self._steps.append((reply, recorded.answer))
        self._snapshot = recorded.snapshot
        return Step(**recorded.answer)

    async def reward(self) -> float:
        """As `OpenEnvironment.reward`. Raises as `step`."""
        outcome = self._recorded.outcome
        if outcome is not None and outcome.reward is not None:
            return outcome.reward
        return await (await self.open()).reward()

    async def close(self) -> None:
        """Close it, if it is open; does not raise."""
        if self._open is not None:
            await self._open.close()


def _fields(answer: Any) -> dict[str, Any]:
    """Of a `Start` or `Step`, whose values JSON holds."""
    return {name: getattr(answer, name) for name in answer.__dataclass_fields__}
