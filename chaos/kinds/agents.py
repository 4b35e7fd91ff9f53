"""Episodes that agents play: agents that fail, their gateway, and runners, generators and drivers that are lost in the
middle of one.

An agent fails because of an order (`chaos.agents`), as an environment does, and so does a runner's gateway
(`chaos.gateway_failures`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from chaos import agents, environments, gateway_failures
from chaos.driver_under_test import DriverUnderTest
from chaos.evidence import Evidence, Outcome
from chaos.faults import KILL, STOP, Fault
from chaos.kind import Kind
from chaos.kinds.episodes import (
    RUNNER,
    BetweenTurns,
    DriverKilledInEpisodes,
    EnvironmentFailure,
    RunnerFault,
    ended_first,
    pausing,
    worker_up,
)
from chaos.kinds.failures import FailureOnOrder
from chaos.kinds.workers import MECHANISMS
from chaos.witness.journals import read_environments

AGENTS = {"agents": 1}
CLOSED = (401, 404, 410)
"""How a gateway answers requests of a session that it has closed."""


@dataclass(frozen=True, kw_only=True)
class AgentFailure(EnvironmentFailure):
    """An agent fails between two of its requests."""

    victim: str = "agent"
    state: str = "an episode"
    what: ClassVar[str] = "agent's episode"


@dataclass(frozen=True, kw_only=True)
class LeakedSession(AgentFailure):
    """Something that an agent left behind goes on asking at its URL: once that was refused, nothing may be answered."""

    def outcome(self, evidence: Evidence, fault: Fault, injection: dict[str, Any]) -> Outcome:
        """It must have asked, and been refused for good."""
        found = super().outcome(evidence, fault, injection)
        if found.problem:
            return found
        problem = leaks_problem([line for line in read_environments(evidence.record.journals)
                                 if line["event"] == agents.LEAKED])
        return replace(found, problem=problem)


def leaks_problem(lines: list[dict[str, Any]]) -> str:
    """Why requests at the URLs of attempts that have ended were not refused as they should; empty if they were.

    Args:
        lines: of the journals, about requests that agents have left behind.
    """
    closed: set[str] = set()
    for line in sorted(lines, key=lambda line: float(line["time"])):
        if line["status"] in CLOSED:
            closed.add(line["session"])
        elif line["session"] in closed and line["status"]:
            return f"a request of a session that was closed was answered {line['status']}"
    return "" if closed else "no request of a session that was closed was made"


@dataclass(frozen=True, kw_only=True)
class GatewayFailure(FailureOnOrder):
    """The gateway of a runner fails while an agent of it is between two requests."""

    failure: str
    role: str = RUNNER
    victim: str = "gateway"
    state: str = "episodes of agents under way"

    colour: ClassVar[str] = "environment"
    what: ClassVar[str] = "gateway"
    good: ClassVar[str] = "session of the same runner, or of its successor, was answered"

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Wait until an agent pauses, and order it."""
        paused = await pausing(driver, fault, fault.rank)
        _, process = await worker_up(driver, self.role, fault.rank)
        driver.injected(fault, role=self.role, rank=fault.rank, pid=process.pid, in_state=True,
                        state="an agent is between two requests")
        gateway_failures.order_gateway_failure(driver.injections.path, fault.number, self.failure, process.pid)
        await self.carried_out(gateway_failures.gateway_order_file(driver.injections.path))
        paused.unlink(missing_ok=True)

    def went_unnoticed(self, evidence: Evidence, injection: dict[str, Any]) -> bool:
        """The driver has ended before it was over, because of another fault."""
        return ended_first(evidence, injection)


def _agent(name: str, words: str, mechanism: str, failure: str, family: type[AgentFailure] = AgentFailure,
           where: str = "asker", **more: Any) -> AgentFailure:
    return family(name=f"agent_{name}", words=f"an agent {words}", mechanism=mechanism, failure=failure, where=where,
                  runs=AGENTS, **more)


def _gateway(name: str, words: str, mechanism: str, failure: str) -> GatewayFailure:
    return GatewayFailure(name=f"gateway_{name}", words=words, mechanism=mechanism, failure=failure, runs=AGENTS)


KINDS: tuple[Kind, ...] = (
    _agent("kill", "is killed, and its process with the agents beside it", "SIGKILL", environments.KILL),
    _agent("kill_before_request", "is killed before its first request", "SIGKILL", environments.KILL_IN_RESET,
           state="a start", events=()),
    _agent("stop", "is stopped, and the agents beside it", "SIGSTOP", environments.STOP),
    _agent("hang", "never returns, deaf to signals", "blocks", environments.HANG),
    _agent("hold", "never returns, and blocks the agents beside it", "holds the lock", environments.HOLD),
    _agent("silent", "never asks", "blocks", environments.HANG_IN_RESET, state="a start", events=()),
    _agent("endless", "asks until it is refused, and is killed", "asks without end", agents.ENDLESS),
    _agent("connections", "opens hundreds of connections at once", "opens connections", agents.CONNECTIONS, events=()),
    _agent("large", "sends a body of 33 MiB", "sends too much", agents.LARGE, events=()),
    _agent("half_open", "leaves requests half sent", "sends half requests", agents.HALF_OPEN, events=()),
    _agent("reset", "leaves before its answer comes, and asks again", "connection ends", agents.RESET_CONNECTION,
           events=()),
    _agent("leak", "fails, and leaves a process and a thread behind that go on asking", "leaks its session",
           agents.LEAK_SESSION, LeakedSession),
    _agent("leak_after_return", "returns, and leaves a thread behind that goes on asking", "leaks its session",
           agents.LEAK_AFTER_RETURN, LeakedSession, state="its return", events=()),
    _agent("server_kill", "loses the server of its world", "SIGKILL", agents.KILL_SERVER, where="client",
           victim="server of an agent"),
    _agent("program_kill", "that is a program is killed", "SIGKILL", environments.KILL, where="program",
           victim="program of an agent"),
    _agent("program_host_kill", "that is a program loses the process that has started it", "SIGKILL", agents.KILL_HOST,
           where="program", victim="process of a program"),
    _agent("program_stop", "that is a program is stopped", "SIGSTOP", environments.STOP, where="program",
           victim="program of an agent"),
    _gateway("listener", "the listening socket of a gateway is shut down", "shutdown(2)", gateway_failures.LISTENER),
    _gateway("connections", "all connections of a gateway are reset", "RST", gateway_failures.CONNECTIONS),
    _gateway("thread", "the thread of a gateway ends by an exception", "raises", gateway_failures.THREAD),
    _gateway("stuck", "the thread of a gateway blocks", "blocks", gateway_failures.STUCK),
    RunnerFault(name="runner_kill_with_agents", mechanism=MECHANISMS[KILL], signal=KILL,
                words="an episode runner is killed with its gateway and episodes of agents under way",
                state="episodes of agents under way", runs=AGENTS),
    RunnerFault(name="runner_stop_with_agents", mechanism=MECHANISMS[STOP], signal=STOP,
                words="the same is stopped, and continued after it was replaced",
                state="episodes of agents under way", runs=AGENTS),
    BetweenTurns(name="generator_kill_with_agents", mechanism=MECHANISMS[KILL], signal=KILL,
                 words="a generator is killed while an agent is between two requests",
                 state="between two requests of an agent", runs=AGENTS),
    DriverKilledInEpisodes(name="driver_kill_with_agents", mechanism=MECHANISMS[KILL], signal=KILL,
                           words="the driver is killed in the middle of episodes of agents; --resume",
                           state="episodes of agents under way", runs=AGENTS),
)
"""Kinds of this module."""
