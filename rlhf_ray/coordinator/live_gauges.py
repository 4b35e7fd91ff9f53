"""Live Prometheus gauges of a run: progress, busy workers, buffer. Read from the coordinator every few seconds."""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping

from rlhf_ray.config.derived import placements_of
from rlhf_ray.config.stages import PPOConfig, role_facts
from rlhf_ray.coordinator.loop import Coordinator
from rlhf_ray.observability.prometheus import LiveValue

WINDOW_S = 60.0
"""Window of the mean `live/pool_busy`: longer than the times that a healthy pool waits for another one."""


def pools_of(config: PPOConfig) -> dict[str, str]:
    """The pool of each role that the run starts, by the name of its workers."""
    facts = role_facts(type(config))
    return {facts[section].worker: placement.pool for section, placement in placements_of(config).items()}


class LiveGauges:
    """Computes the gauges, with means over the last minute."""

    def __init__(self, pools: Mapping[str, str], now: Callable[[], float] = time.monotonic) -> None:
        """`pools` gives each role's pool, see `pools_of`."""
        self._pool = pools
        self._now = now
        self._seen: deque[tuple[float, dict[str, float]]] = deque()
        """(time, busy share of each pool's workers)."""
        self._step = -1
        self._since = now()
        self._generators: set[int] = set()
        """Ranks of all generators so far."""

    def read(self, coordinator: Coordinator) -> list[LiveValue]:
        """The present values. Call it at regular intervals."""
        return [*self._progress(coordinator), *self._workers(coordinator), *_held(coordinator),
                *self._behind(coordinator)]

    def _progress(self, coordinator: Coordinator) -> Iterator[LiveValue]:
        state = coordinator.state
        now = self._now()
        if state.step != self._step:
            self._step = state.step
            self._since = now
        yield LiveValue("live/step", state.step, {})
        yield LiveValue("live/steps", coordinator.config.run.steps, {})
        yield LiveValue("live/samples", state.samples, {})
        yield LiveValue("live/step_age", now - self._since, {})

    def _workers(self, coordinator: Coordinator) -> Iterator[LiveValue]:
        roles = coordinator.roles
        now = roles.clock.now()
        under_way = roles.clock.under_way
        down = roles.health.down.keys()
        missing = Counter(role for role, _ in roles.health.missing)
        lost = Counter(role for role, _ in down) - missing
        busy = Counter(role for role, _ in {(task.role, task.worker) for task in under_way} - down)
        numbers: dict[str, Counter[str]] = defaultdict(Counter)
        for role, count in roles.workers().items():
            pool = self._pool[role]
            idle = count - busy[role] - lost[role] - missing[role]
            for state, number in (("busy", busy[role]), ("idle", idle), ("down", lost[role]),
                                  ("missing", missing[role])):
                numbers[pool][state] += number
                yield LiveValue("live/workers", number, {"role": role, "pool": pool, "state": state})
            oldest = max((now - task.since for task in under_way if task.role == role), default=0.0)
            yield LiveValue("live/oldest_call", oldest, {"role": role})
        yield from self._pools({pool: its["busy"] / its.total() for pool, its in numbers.items()})

    def _pools(self, busy: dict[str, float]) -> Iterator[LiveValue]:
        now = self._now()
        self._seen.append((now, busy))
        while self._seen[0][0] < now - WINDOW_S:
            self._seen.popleft()
        for pool in busy:
            shares = [shares.get(pool, 0.0) for _, shares in self._seen]
            yield LiveValue("live/pool_busy", sum(shares) / len(shares), {"pool": pool})

    def _behind(self, coordinator: Coordinator) -> Iterator[LiveValue]:
        version = coordinator.state.step
        roles = coordinator.roles
        down = [rank for role, rank in roles.health.down if role == roles.generators.role]
        present = {*roles.dispatcher(roles.generators).scheduler.up, *down}
        self._generators |= present
        for rank in sorted(self._generators):  # a gauge keeps its last value, so removed generators are set to 0
            behind = version - coordinator.weights.confirmed.get(rank, 0) if rank in present else 0
            yield LiveValue("live/versions_behind", behind, {"worker": f"generator/{rank}"})


def _held(coordinator: Coordinator) -> Iterator[LiveValue]:
    buffer = coordinator.buffer.stats()
    quarantine = coordinator.pipeline.quarantine
    for state, samples in (("ready", buffer.samples_ready), ("under_way", buffer.samples_reserved),
                           ("training", buffer.samples_leased)):
        yield LiveValue("live/buffer", samples, {"state": state})
    yield LiveValue("live/buffer_mb", buffer.bytes / 2**20, {})
    yield LiveValue("live/quarantined", quarantine.samples if quarantine else 0, {})
    yield LiveValue("live/lost_workers", coordinator.roles.health.log.lost_so_far, {})
    yield LiveValue("live/policy_version", coordinator.state.step, {})
