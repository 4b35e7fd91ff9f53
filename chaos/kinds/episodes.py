"""Episodes: environments that fail in a step, and runners, generators and drivers that are lost in the middle of one.

An environment fails because of an order (`chaos.environments`). What became of the episodes is in the run's metrics:
how many went on from a journal, began again, were interrupted by a neighbour's loss, or retried.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import yaml

from chaos import environments
from chaos.driver_under_test import POLL_S, DriverUnderTest
from chaos.evidence import Evidence, Outcome
from chaos.faults import KILL, STOP, Fault
from chaos.kinds.drivers import DriverSignal
from chaos.kinds.failures import FailureOnOrder
from chaos.kinds.nodes import NodeFault
from chaos.kinds.workers import MECHANISMS, FaultInEvaluation, WorkerFault
from rlhf_ray.observability.metrics import read_metrics

if TYPE_CHECKING:
    import psutil

    from rlhf_ray.workers.worker_group import WorkerGroup

ASKED_EVERY_S = 0.02
"""How often runners are asked what their episodes do."""
ANSWER_S = 2.0
UPDATES_UNTIL_COUNTED = 3
"""An episode that a fault hits is trained on within so many updates."""
REPLACED_S = 120.0
"""Within this time a stopped runner must have been replaced."""
RUNNER = "episode_runner"
LATE = "cause/error_timeout"
AGAIN = ("retries", "interrupted", "continued", "restarted")
GONE_ON = ("continued", "restarted")
TAKEN_OVER = "episodes go on from their journals"
"""A driver that continues a run says so."""
EPISODES, OVERLAPPED = {"episodes": 1}, {"episodes_overlapped": 1}


def counted(evidence: Evidence, injection: dict[str, Any], *events: str) -> bool:
    """Whether the metrics of the updates after an injection count one of these events of episodes."""
    first = injection["step"] + 1
    return any(row.get(f"episodes/{event}") for row in read_metrics(evidence.record.directory) for event in events
               if first <= row["step"] < first + UPDATES_UNTIL_COUNTED)


def went_on(evidence: Evidence, injection: dict[str, Any]) -> bool:
    """Whether an episode has gone on, or begun again, because its runner or driver was lost. With updates that overlap
    that is not required: an episode that went on may be too old for its update when it ends, and is played again."""
    given = yaml.safe_load(evidence.record.config.read_text())
    return given["coordinator"]["max_staleness"] > 0 or counted(evidence, injection, *GONE_ON)


def ended_first(evidence: Evidence, injection: dict[str, Any]) -> bool:
    """Whether the driver ended abruptly before what failed on order had recovered."""
    start = evidence.start_at(injection["time"])
    number = injection["fault"]
    recovered = any(line["fault"] == number for line in evidence.record.injections.read("recovered"))
    return start is not None and start.abrupt and not recovered


async def waiting_episode(driver: DriverUnderTest) -> dict[str, Any]:
    """Wait until an episode waits for a generator in its second turn or a later one."""
    from rlhf_ray.errors import RLHFError
    from rlhf_ray.roles.episode_runner import EpisodeRunner
    from rlhf_ray.workers.calls import Deadline

    runners = driver.coordinator.roles.runners
    assert runners is not None, "the run has no episodes"
    while True:
        for each in runners.ranks:
            if (runners.role, each) in driver.coordinator.roles.health.down:
                continue
            with suppress(RLHFError):
                for episode in await runners.call(each, EpisodeRunner.activity, deadline=Deadline(ANSWER_S)).value():
                    if episode["turn"] > 1 and episode["doing"] == "a generator" and \
                            not driver.coordinator.state.unmeasured:
                        return dict(episode)
        await asyncio.sleep(ASKED_EVERY_S)


def in_words(episode: dict[str, Any]) -> str:
    """What an open episode does."""
    return f"an episode of row {episode['key'][1]} in turn {episode['turn']}, waiting for {episode['doing']}"


async def pausing(driver: DriverUnderTest, fault: Fault, rank: int | None = None) -> Path:
    """Order an environment to wait between two turns of an episode, of the runner of this rank, or of any; returns when
    it does. It goes on when the file is removed, or after `environments.PAUSE_S`."""
    from chaos.victims import is_up

    place = driver.injections.path
    paused = environments.paused_file(place, fault.number)
    paused.unlink(missing_ok=True)
    while True:
        _, runner = (None, None) if rank is None else await worker_up(driver, RUNNER, rank)
        environments.order_failure(place, fault.number, environments.PAUSE, runner=runner.pid if runner else 0)
        while runner is None or is_up(runner):
            if paused.exists():
                return paused
            await asyncio.sleep(POLL_S)


# Environments


@dataclass(frozen=True, kw_only=True)
class EnvironmentFailure(FailureOnOrder):
    """An environment fails in one call."""

    failure: str
    where: str = ""
    """In which; empty for any."""
    victim: str = "environment"
    state: str = "a step"
    events: tuple[str, ...] = AGAIN
    """One of them is counted; none if nothing was lost: a reset that is repeated, output that is dropped."""

    colour: ClassVar[str] = "environment"
    what: ClassVar[str] = "episode"
    good: ClassVar[str] = "answer of the same turn"

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Order the next call to fail."""
        driver.injected(fault, in_state=True, state="a call of an episode")
        environments.order_failure(driver.injections.path, fault.number, self.failure, self.where)
        await self.carried_out(environments.order_file(driver.injections.path))

    def outcome(self, evidence: Evidence, fault: Fault, injection: dict[str, Any]) -> Outcome:
        """It must have failed, the same turn have been answered afterwards, and the run have counted what it did."""
        found = super().outcome(evidence, fault, injection)
        if not found.problem and self.events and not counted(evidence, injection, *self.events):
            found = replace(found, problem=f"no update counts any {' or '.join(self.events)}")
        return found

    def went_unnoticed(self, evidence: Evidence, injection: dict[str, Any]) -> bool:
        """A driver that ends abruptly loses what its metrics would say, and the order with it."""
        return ended_first(evidence, injection)


@dataclass(frozen=True, kw_only=True)
class KilledInReplay(EnvironmentFailure):
    """The process of an environment is killed in a step, and its successor while that episode is replayed."""

    def outcome(self, evidence: Evidence, fault: Fault, injection: dict[str, Any]) -> Outcome:
        """Both must have been killed."""
        found = super().outcome(evidence, fault, injection)
        killed = [line for line in evidence.record.injections.read("confirmed")
                  if line["fault"] == fault.number and line["time"] >= injection["time"]]
        if not found.problem and len(killed) < 2:
            found = replace(found, problem="no process was killed in the replay")
        return found


@dataclass(frozen=True, kw_only=True)
class EpisodeDeadline(EnvironmentFailure):
    """An environment does not answer until the deadline of its episode passes: the episode is masked."""

    state: str = "a step, until the episode's deadline"
    events: tuple[str, ...] = (LATE,)
    updates: int = 2
    changes_results: bool = True

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Order it, and let training go on until it is masked."""
        await super().inject(driver, fault)
        step = driver.coordinator.state.step
        while driver.coordinator.state.step <= step + 1:
            await asyncio.sleep(POLL_S)
        driver.injections.add("recovered", fault=fault.number)


# Runners


@dataclass(frozen=True, kw_only=True)
class RunnerFault(WorkerFault):
    """A runner gets a signal while an episode is under way of which a turn is recorded."""

    role: str = RUNNER
    phase: str = "episodes"
    victim: str = RUNNER
    state: str = "episodes under way"

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Wait for such an episode first."""
        await hit_in_pause(self, driver, fault)

    def confirm(self, driver: DriverUnderTest, fault: Fault, process: psutil.Process) -> None:
        """A stopped one is woken up after it was replaced, if it is still there."""
        super().confirm(driver, fault, process)
        if self.signal == STOP:
            driver.in_thread(_wake_when_replaced, *driver.victims[-1])

    def problem_after(self, evidence: Evidence, fault: Fault) -> str:
        """Its episodes must have gone on."""
        injection = evidence.logged("injected", fault)
        return "" if injection and went_on(evidence, injection) else \
            "no update counts an episode that went on, or began again, because its runner was lost"


async def worker_up(driver: DriverUnderTest, role: str, rank: int) -> tuple[WorkerGroup[Any], psutil.Process]:
    """Wait until a worker is there, and not being replaced; returns its group and its process."""
    import psutil

    from chaos.victims import is_up

    (group,) = (group for group in driver.coordinator.roles.all_groups() if group.role == role)
    while True:
        with suppress(psutil.NoSuchProcess):
            if (processes := group.processes(rank)) is not None and (role, rank) not in \
                    driver.coordinator.roles.health.down and is_up(process := psutil.Process(processes.pid)):
                return group, process
        await asyncio.sleep(POLL_S)


async def hit_worker(kind: WorkerFault, driver: DriverUnderTest, fault: Fault, rank: int, state: str) -> None:
    """Let a kind hit the worker of a rank now."""
    group, process = await worker_up(driver, kind.role, rank)
    driver.injected(fault, role=kind.role, rank=rank, pid=process.pid, incarnation=group.incarnation(rank),
                    in_state=True, state=state)
    driver.hit(group, rank, process)
    await kind.hit(driver, fault, group, process)
    kind.confirm(driver, fault, process)


async def hit_in_pause(kind: WorkerFault, driver: DriverUnderTest, fault: Fault) -> None:
    """Let a kind hit a runner while one of its episodes pauses, so that a turn of it is recorded."""
    paused = await pausing(driver, fault, fault.rank)
    await hit_worker(kind, driver, fault, fault.rank, "an episode is between two turns")
    paused.unlink(missing_ok=True)


def _wake_when_replaced(group: WorkerGroup[Any], rank: int, incarnation: int, process: psutil.Process) -> None:
    """Continue a stopped process once another one has its place."""
    import psutil

    until = time.monotonic() + REPLACED_S
    with suppress(psutil.NoSuchProcess):
        while group.incarnation(rank) == incarnation and process.is_running() and time.monotonic() < until:
            time.sleep(ASKED_EVERY_S)
        process.resume()


@dataclass(frozen=True, kw_only=True)
class RunnerKilledInReplay(RunnerFault):
    """The runner that goes on with the episodes of one that was killed is killed, too."""

    state: str = "going on from a journal"
    preceded_by: str = "runner_kill"
    most_delay_s: float = 0.3

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Wait for a call that looks into journals, and a moment longer."""
        runners = driver.coordinator.roles.runners
        assert runners is not None, "the run has no episodes"
        original, ranks = runners.call, list[int]()

        def call(rank: int, method: Any, *arguments: Any, **named: Any) -> Any:
            lost = any(role == runners.role for role, _ in driver.coordinator.roles.health.down)
            if lost and any(getattr(each, "look", False) for each in (*arguments, *named.values())):
                ranks.append(rank)
            return original(rank, method, *arguments, **named)

        runners.call = call  # type: ignore[method-assign, assignment]
        try:
            while not ranks:
                await asyncio.sleep(POLL_S)
        finally:
            del runners.call
        await asyncio.sleep(fault.delay_s)
        await hit_worker(self, driver, fault, ranks[0], "it goes on with the episodes of a runner that was lost")


@dataclass(frozen=True, kw_only=True)
class RunnerCutOff(NodeFault):
    """The node of a runner is cut off, and comes back after the runner was replaced."""

    cut_off: bool = True

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Wait until a turn of one of its episodes is recorded."""
        await hit_in_pause(self, driver, fault)

    def problem_after(self, evidence: Evidence, fault: Fault) -> str:
        """The node must have been away, and the episodes have gone on elsewhere."""
        injection = evidence.logged("injected", fault)
        return super().problem_after(evidence, fault) or (
            "" if injection and went_on(evidence, injection) else "no update counts an episode that went on")


# Generators and the driver


@dataclass(frozen=True, kw_only=True)
class GeneratorFault(WorkerFault):
    """A generator gets a signal when an episode is at a certain place."""

    role: str = "generator"
    phase: str = "sample"
    victim: str = "generator"

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Wait for an episode that waits for a generator in a further turn."""
        await worker_up(driver, self.role, fault.rank)
        episode = await waiting_episode(driver)
        await hit_worker(self, driver, fault, fault.rank, in_words(episode))


@dataclass(frozen=True, kw_only=True)
class BetweenTurns(GeneratorFault):
    """The same while the environment of an episode answers."""

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Order an environment to wait; it goes on when the generator was hit."""
        await worker_up(driver, self.role, fault.rank)
        paused = await pausing(driver, fault)
        await hit_worker(self, driver, fault, fault.rank, "an episode is between two turns")
        paused.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class DriverKilledInEpisodes(DriverSignal):
    """The driver is killed when turns of open episodes are recorded."""

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Let an episode pause until the checkpoint of the policy that plays it is written: turns of a later policy
        than the restored one are not continued."""
        store = driver.coordinator.recovery.store
        while True:
            paused = await pausing(driver, fault)
            until = time.monotonic() + environments.PAUSE_S - 1.0
            while not (saved := driver.coordinator.state.step in dict(store.steps())) and time.monotonic() < until:
                await asyncio.sleep(ASKED_EVERY_S)
            if saved:
                break
            paused.unlink(missing_ok=True)
        driver.injected(fault, pid=os.getpid(), state="an episode is between two turns")
        os.kill(os.getpid(), self.signal)

    def outcome(self, evidence: Evidence, fault: Fault, injection: dict[str, Any]) -> Outcome:
        """The resumed run must go on with the episodes."""
        found = super().outcome(evidence, fault, injection)
        says_so = any(TAKEN_OVER in line for line in evidence.logs())
        if not found.problem and not (says_so and went_on(evidence, injection)):
            found = replace(found, problem="the resumed run continued no episode")
        return found


def _environment(name: str, words: str, mechanism: str, failure: str, family: type[EnvironmentFailure] =
                 EnvironmentFailure, runs: dict[str, int] = EPISODES, **more: Any) -> EnvironmentFailure:
    return family(name=f"environment_{name}", words=f"an environment {words}", mechanism=mechanism, failure=failure,
                  runs=runs, **more)


def _runner(name: str, words: str, signal: int, family: type[WorkerFault] = RunnerFault,
            runs: dict[str, int] = EPISODES, **more: Any) -> WorkerFault:
    return family(name=f"runner_{name}", words=words, mechanism=MECHANISMS[signal], signal=signal, runs=runs, **more)


KINDS = (
    _environment("kill", "is killed in a step", "SIGKILL", environments.KILL, runs={**EPISODES, **OVERLAPPED}),
    _environment("kill_in_replay", "is killed in a step, and again while that episode is replayed", "SIGKILL",
                 environments.KILL_TWICE, KilledInReplay, where="talk", state="a replay"),
    _environment("kill_in_reset", "is killed in a reset", "SIGKILL", environments.KILL_IN_RESET, state="a reset",
                 events=()),
    _environment("hang", "blocks in a step, deaf to signals", "blocks", environments.HANG),
    _environment("hold", "blocks in C code with the interpreter's lock", "holds the lock", environments.HOLD),
    _environment("flood", "writes 32 MiB to its output in a step", "floods its output", environments.FLOOD, events=()),
    _environment("fork", "forks in a step, and exits without an answer", "forks", environments.FORK),
    _environment("leak", "allocates memory in a step up to its bound", "leaks memory", environments.LEAK),
    EpisodeDeadline(name="episode_late", words="an environment does not answer before the episode's deadline",
                    mechanism="stalls", failure=environments.STALL, where="brief", runs=OVERLAPPED),
    _runner("kill", "an episode runner is killed with episodes under way", KILL, runs={**EPISODES, **OVERLAPPED}),
    _runner("stop", "an episode runner is stopped with episodes under way, and continued after it was replaced", STOP),
    _runner("kill_in_replay", "the runner that goes on with the episodes of one that was killed is killed", KILL,
            RunnerKilledInReplay),
    _runner("kill_in_evaluation", "an episode runner is killed in an evaluation", KILL, FaultInEvaluation,
            role=RUNNER, phase="episodes", victim=RUNNER, state="evaluation", most_sightings=1,
            most_delay_s=0.1),
    RunnerCutOff(name="runner_partition", mechanism="cut off", role=RUNNER, phase="episodes",
                 words="a node with an episode runner is cut off, and comes back after it was replaced",
                 victim="node of an episode runner", state="episodes under way",
                 runs={"runner_nodes": 1}),
    BetweenTurns(name="generator_kill_between_turns", mechanism=MECHANISMS[KILL], signal=KILL,
                 words="a generator is killed while the environment of an episode answers",
                 state="between two turns of an episode", runs={**EPISODES, **OVERLAPPED}),
    GeneratorFault(name="generator_stop_in_turn", mechanism=MECHANISMS[STOP], signal=STOP,
                   words="a generator is stopped in a later turn of an episode", state="turn of an episode",
                   runs=EPISODES),
    DriverKilledInEpisodes(name="driver_kill_in_episodes", mechanism=MECHANISMS[KILL], signal=KILL,
                           words="the driver is killed in the middle of episodes; --resume",
                           state="episodes under way", runs={**EPISODES, **OVERLAPPED}),
)
"""Kinds of this module."""
