"""An open episode of an environment, whichever process it is in.

An episode that hangs is ended by killing its process; its neighbours there are brought back elsewhere: from their
newest snapshot, or by repeating what the policy did. A call that was under way when a process died is repeated once in
a process of its own, so that the one to blame is found, and a process that something else killed costs nothing. Where
several were under way, they are repeated together once, and if their process dies again, in turn, each in a process of
its own. An episode that another runner has played is brought back in the same way.
"""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_ray.environments.host_process import SHOWN, Answer, Call, HostLost, HostProcess
from rlhf_ray.environments.hosts import Hosts
from rlhf_ray.environments.protocol import Reply
from rlhf_ray.errors import EnvironmentFailed, EpisodeFailed, ReplayDiverged, with_lines

INTERRUPTED_ALONE = 3
"""After so many interruptions an episode is opened again in a process of its own."""
COMPARED = ("messages", "tools", "observation", "reward", "done", "truncated", "tool_errors")
"""What a replay must answer as before; the numbers of `info` may be times."""


@dataclass(frozen=True)
class Played:
    """What another process has played of an episode."""

    start: Answer
    """The answer of reset: messages, tools and observation."""
    steps: Sequence[tuple[Reply, Answer]]
    """The replies, and the fields of the `Step` that answered each."""
    snapshot: Any = None
    """`OpenEnvironment.snapshot` after the last of them; None if it gave none."""


class OpenEpisode:
    """An open episode. One call at a time; `close` ends it in any state."""

    KIND: Literal["environment", "agent"] = "environment"
    """What the user's code is, in messages and causes."""

    def __init__(self, hosts: Hosts, number: int) -> None:
        self.call: Call | None = None
        """The call of user code that is under way."""
        self.since = 0.0
        """When it began, in the event loop's time."""
        self.interrupted = 0
        """How often it was opened again because its process was lost through no fault of its own."""
        self.snapshot: Any = None
        """The environment's state after the newest answer, which JSON holds; None if it gives none."""
        self._hosts, self._number = hosts, number
        self._suspect = False
        """Its call may be to blame for the loss of a process, which `_ending` describes."""
        self._has_turn = False
        """It has one of `Hosts.turns`."""
        self._died_before = False
        """Its process has died since the last answer, while several calls were under way in it."""
        self._ending = ""
        self._lost = "lost its process"
        """Why it is brought back, as the predicate of messages."""
        self._asked: Call = "reset"
        """The last call."""
        self._process: HostProcess | None = None
        self._begin = b""
        self._start: Answer | None = None
        self._history: list[tuple[bytes, Answer]] = []
        """The replies, pickled, and what was answered. Empty where snapshots are used in place of it."""

    @property
    def tool(self) -> str:
        """The tool that runs now; "" if none does."""
        return self._process.tools.get(self._number, "") if self._process else ""

    @property
    def busy(self) -> bool:
        """User code runs for it, although perhaps nobody waits for it any more."""
        return self._process is not None and self._process.under_way(self._number) is not None

    async def open(self, row: dict[str, Any], seed: int, played: Played | None) -> Answer:
        """The answer of reset; that of `played`, if it is brought back. Raises EpisodeFailed, ReplayDiverged."""
        self._begin = self._pickled({"row": row, "seed": seed})
        if played is not None:
            self._lost = "lost its runner"
            self._start = played.start
            self._history = [(self._pickled({"reply": reply}), answer) for reply, answer in played.steps]
            self.snapshot = played.snapshot
        await self._reopen()
        self._answered()
        self._lost = "lost its process"
        self.interrupted = 0  # what happened before does not count
        assert self._start is not None
        return self._start

    async def step(self, reply: Reply) -> Answer:
        """The answer of step. Raises EpisodeFailed, ReplayDiverged."""
        given = self._pickled({"reply": reply})
        answer = await self._perform("step", given)
        if self.snapshot is None:
            self._history.append((given, answer))
        return answer

    async def reward(self) -> float:
        """The answer of get_reward. Raises as `step`."""
        return float((await self._perform("reward", b""))["reward"])

    async def close(self) -> None:
        """Close it; does not raise. A call whose caller was cancelled may end before."""
        process = self._process
        try:
            if process is None or process.lost is not None or not process.ready.done():
                return
            if (future := process.under_way(self._number)) is not None:
                await self._wait_for_cancelled(process, future)
            await self._ask("close", b"")
        except HostLost:
            pass  # it is gone
        except EpisodeFailed as error:
            self._hosts.printed.add(str(error))
        finally:
            self._leave()

    async def _wait_for_cancelled(self, process: HostProcess, future: asyncio.Future[Answer]) -> None:
        """Let a call end whose caller was cancelled, or kill its process when its time is over."""
        left = self.since + self._limit_s(self._asked) - asyncio.get_running_loop().time()
        await asyncio.wait([future], timeout=max(0.0, left))
        if not future.done():
            await self._overdue(process, self._asked, future)

    async def _perform(self, call: Call, given: bytes) -> Answer:
        while True:
            await self._reopen()
            try:
                answer = await self._ask(call, given)
            except HostLost as lost:
                self._after(lost, call)
                continue
            self._answered()
            return answer

    def _answered(self) -> None:
        """It has answered: others may be in its process again."""
        self._died_before = False
        if self._suspect and self._process is not None:
            self._suspect = False
            self._process.alone = self._hosts.config.own_process
            self._end_turn()

    async def _reopen(self) -> None:
        """Open it where it is not open, and bring it to where it was. Raises EpisodeFailed, ReplayDiverged."""
        began = self._start is not None
        try:
            await self._enter_process()
        except EpisodeFailed as error:
            if not began or self._hosts.stopped:
                raise
            raise ReplayDiverged(f"the episode must begin again, since its environment {self._lost} and cannot be "
                                 f"brought back: {error}") from error

    async def _enter_process(self) -> None:
        """`_reopen`, whose failure may be that of what was answered before."""
        if self._process is not None and self._process.lost is not None:
            self._leave()
        while self._process is None:
            hosts = self._hosts
            if self._suspect and not hosts.config.own_process:  # which is not lost with others
                await hosts.turns.acquire()
                self._has_turn = True
            if hosts.stopped:
                raise EpisodeFailed("error_environment", f"{hosts.who} was stopped")
            if not self._can_come_back:
                raise ReplayDiverged(f"{hosts.who} {self._lost}, and is neither replayable nor has it snapshot() and "
                                     "restore(snapshot); the episode must begin again")
            alone = self._suspect or self.interrupted >= INTERRUPTED_ALONE
            self._process = hosts.enter(self._number, alone)
            try:
                await asyncio.shield(self._process.ready)
                await self._bring_back()
            except HostLost as lost:
                self._after(lost, self._asked)
            except EnvironmentFailed as error:  # another process could not be started
                raise EpisodeFailed("error_environment", str(error)) from None

    @property
    def _can_come_back(self) -> bool:
        """Whether another process can bring it to where it was."""
        facts = self._hosts.facts
        assert facts is not None
        return self._start is None or facts.replayable or (facts.restorable and self.snapshot is not None)

    async def _bring_back(self) -> None:
        """Bring it to where it was, in a process that does not have it yet."""
        hosts = self._hosts
        if self._start is None:
            self._start = await self._ask("reset", self._begin)
            return
        if hosts.facts and hosts.facts.restorable and self.snapshot is not None:
            await self._ask("restore", self._pickled({"snapshot": self.snapshot}))
            self._history.clear()
        else:
            self._compare("reset", self._start, await self._ask("reset", self._begin))
            for turn, (given, answer) in enumerate(self._history):
                self._compare(f"step {turn}", answer, await self._ask("step", given))
        self.interrupted += 1

    def _compare(self, what: str, before: Answer, now: Answer) -> None:
        for name in COMPARED:
            if (old := json.dumps(before.get(name))) != (new := json.dumps(now.get(name))):
                raise ReplayDiverged(
                    f"{self._hosts.who} {self._lost}, and answered {what} differently when it was repeated: {name} was "
                    f"{old[:SHOWN]} and is {new[:SHOWN]}. Make it depend on the row and the seed alone, give it "
                    "snapshot() and restore(snapshot), or set replayable = False")

    async def _ask(self, call: Call, given: bytes) -> Answer:
        """The answer of user code.

        Raises:
            HostLost: the process is gone.
            EpisodeFailed: the user's code raised, answered nonsense, or took too long.
        """
        process = self._process
        assert process is not None and not self.busy
        self.call = self._asked = call
        self.since = asyncio.get_running_loop().time()
        try:
            future = process.ask(self._number, call, given)
            answered = await self._in_time(call, future)
            message = future.result() if answered else await self._overdue(process, call, future)
        finally:
            self.call = None
        if "error" in message:
            if message["exhausted"]:
                self._exhausted(process, message)
            raise EpisodeFailed(self._cause, with_lines(
                f"{self._hosts.who} failed{self._where(call)}: {message['error']}", "", f"Fix the {self.KIND}"))
        if message["snapshot"] is not None:
            self.snapshot = message["snapshot"]
        return dict(message["answer"])

    @property
    def _cause(self) -> Literal["error_environment", "error_agent"]:
        """Of a failure of the user's code."""
        return "error_agent" if self.KIND == "agent" else "error_environment"

    def _where(self, call: Call) -> str:
        """The call at the end of a sentence; nothing for an agent, which has only one."""
        return "" if call == "run" else f" in {call}"

    async def _in_time(self, call: Call, future: asyncio.Future[Answer]) -> bool:
        """Wait for an answer as long as the call may take; returns whether there is one."""
        answered, _ = await asyncio.wait([future], timeout=self._limit_s(call))
        return bool(answered)

    def _late(self, call: Call) -> tuple[str, str]:
        """What a call has not done in its time, as the predicate of a message, and the field of that time."""
        tool = f" (tool `{self.tool}`)" if self.tool else ""
        field = "reset" if call in ("reset", "restore") else "step"
        return f"gave no answer to {call}{tool} within {self._limit_s(call):g} s", field

    def _limit_s(self, call: Call) -> float:
        limits = self._hosts.config.timeout_s
        return limits.reset if call in ("reset", "restore") else limits.step

    async def _overdue(self, process: HostProcess, call: Call, future: asyncio.Future[Answer]) -> Answer:
        """A call has taken too long: kill its process, unless it answers just now."""
        late, field = self._late(call)
        line = await process.line(self._number)
        if future.done():
            return future.result()
        stopped = line is None and process.stopped
        if (line is None and process.calls > 1) or (stopped and not self._suspect):
            # C code holds the interpreter's lock, which may be a neighbour's, or something has sent SIGSTOP.
            process.give_up(HostLost("unclear", "did not answer"))
            return future.result()
        gone = process.give_up(HostLost("neighbour", "was killed because of another episode"))
        if gone is not None:
            await asyncio.shield(gone)
        place = f"  {line}" if line else ""
        if line is None:
            place = "  (its process is stopped)" if stopped else "  (C code holds the interpreter's lock)"
        raise EpisodeFailed("error_timeout", with_lines(
            f"{self._hosts.who} {late}; its process was killed", place,
            f"Make it faster, or raise environments.{self._hosts.name}.timeout_s.{field}"))

    def _exhausted(self, process: HostProcess, message: Answer) -> None:
        """The process has no memory or no files left, perhaps because of a neighbour.

        Raises:
            HostLost: it had neighbours.
            EpisodeFailed: it was alone.
        """
        hosts, what = self._hosts, message["exhausted"]
        lost = HostLost("unclear", f"ran out of {what}")
        company = len(process.episodes) > 1
        process.give_up(lost)
        if company:
            raise lost
        advice = "Close files, or raise the limit of open files (ulimit -n)"
        if what == "memory":
            advice = f"Let it use less, or raise environments.{hosts.name}.memory_mib={hosts.config.memory_mib}"
        raise EpisodeFailed(self._cause, with_lines(
            f"{hosts.who} ran out of {what}: {message['error']}", "", advice))

    def _after(self, lost: HostLost, call: Call) -> None:
        """Go on without the process, or raise EpisodeFailed."""
        self._leave()
        hosts = self._hosts
        if lost.kind == "died" and (self._suspect or not self._can_come_back):
            again = "which is not repeated, since it is neither replayable nor has it snapshot() and restore(snapshot)"
            if self._suspect:
                before = "" if self._ending == lost.ending else f" (before that, it {self._ending})"
                again = f"also when that was repeated in a process of its own{before}"
            raise EpisodeFailed(self._cause, f"{hosts.who} {lost.ending}{self._where(call)}, {again}. Fix the "
                                f"{self.KIND}, or raise environments.{hosts.name}.memory_mib="
                                f"{hosts.config.memory_mib}") from None
        # What has killed the process may have come from outside; if it happens again, one of its calls is to blame.
        together = lost.kind == "died with several"
        self._suspect = lost.kind in ("died", "unclear") or (together and self._died_before)
        self._died_before = together
        self._ending = lost.ending

    def _leave(self) -> None:
        if self._process is not None:
            self._hosts.leave(self._process, self._number)
            self._process = None
        self._end_turn()

    def _end_turn(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self._hosts.turns.release()

    def _pickled(self, given: dict[str, Any]) -> bytes:
        try:
            return pickle.dumps(given)
        except Exception as error:
            raise EpisodeFailed("error_environment", f"{self._hosts.who}: {', '.join(given)} cannot be sent to its "
                                f"process: {error}") from None
