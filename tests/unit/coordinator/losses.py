"""Generators that are lost on purpose, and what replaces them and publishes to them."""

import asyncio

from rlhf_ray.config.generation import WeightsConfig
from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.coordinator.weight_sync import WeightSync
from rlhf_ray.errors import WeightsError, WorkerLost
from rlhf_ray.observability.faults import FaultLog
from rlhf_ray.records import PublicationSize, WeightsConfirmed, WeightsPlan
from rlhf_ray.roles.generator import Generator, GeneratorActivity
from rlhf_ray.workers.calls import Startable
from rlhf_ray.workers.health_monitor import HealthMonitor
from tests.unit.coordinator.stand_ins import StandInGroup, role_groups_of


def lost(group, rank, method="generate", kind="died"):
    """The error of a call that `rank`'s present incarnation will not answer."""
    error = WorkerLost(f"{group.role}/{rank} {kind} in {method}")
    error.role, error.rank, error.incarnation = group.role, rank, group.incarnation(rank)
    error.method, error.kind = method, kind
    return error


class LossyGenerators(StandInGroup):
    """Generators of which `doomed` gives the calls (rank, method) that are lost, each once; restarts take 1 s."""

    def __init__(self, workers=2, doomed=(), unrestartable=None):
        super().__init__("generator", self.behave, workers)
        self.doomed, self.unrestartable, self.begun = list(doomed), unrestartable, set()
        self.incarnations, self.given_up, self.tokens, self.versions = [1] * workers, [], 0, [0] * workers
        self.requests = 1

    async def behave(self, rank, method, *args):
        await asyncio.sleep(0.1)
        if (rank, method) in self.doomed:
            self.doomed.remove((rank, method))
            raise lost(self, rank, method)
        if method == "begin_weights":
            self.begun.add(rank)
        if method in ("load_weights", "finish_weights") and rank not in self.begun:
            raise WeightsError(f"generator/{rank} got {method} while no publication was under way")
        if method == "finish_weights":
            self.versions[rank] = args[0]
            return WeightsConfirmed(args[0], 0.5)
        if method == "activity":
            return GeneratorActivity(self.requests, 1e6, self.tokens)
        return rank

    def incarnation(self, rank):
        return self.incarnations[rank]

    def processes(self, rank):
        return None

    def give_up(self, rank, reason):
        self.given_up.append(rank)

    async def respawn(self, rank, reason):
        await asyncio.sleep(1.0)
        self.incarnations[rank] += 1
        self.versions[rank] = 0
        self.begun.discard(rank)

    async def start_one(self, rank, timeout_s):
        if self.unrestartable:
            raise self.unrestartable
        await self.call(rank, Startable.start).value()

    async def start_replica(self, rank, timeout_s):
        await self.start_one(rank, timeout_s)


class ReplacementHarness:
    """A dispatcher over generators that are replaced when they are lost."""

    def __init__(self, path=None, max_restarts=2, heartbeat_timeout_s=10.0, **generators):
        self.said = []
        self.group = LossyGenerators(**generators)
        self.health = HealthMonitor(ClusterConfig(max_restarts=max_restarts, heartbeat_timeout_s=heartbeat_timeout_s),
                                    FaultLog(path, self.said.append, self.said.append))
        self.roles = role_groups_of(self.health, generators=self.group)
        self.dispatcher = self.roles.dispatcher(self.group)
        self.health.register(self.dispatcher.scheduler)

    async def ask_all(self, calls):
        """Ask so many at once; who answered."""
        asked = [self.dispatcher.call(Generator.generate, work=4) for _ in range(calls)]
        return sorted(call.rank for call in await asyncio.gather(*asked))


class PublishingHarness(ReplacementHarness):
    """Generators that take weights, and are replaced."""

    def __init__(self, **generators):
        super().__init__(**generators)
        self.policy = StandInGroup("policy", self.learner)
        self.roles = role_groups_of(self.health, generators=self.group, policy=self.policy)
        self.roles.dispatchers["generator"] = self.dispatcher
        self.sync = WeightSync(WeightsConfig(), self.roles)
        self.health.register(self.dispatcher.scheduler, self.sync.catch_up)
        self.health.register_learners([self.policy])
        self.learner_lost = 0

    async def learner(self, rank, method, *args):
        if method == "plan_weights":
            return WeightsPlan(PublicationSize(40, 300), PublicationSize(40, 300))
        if self.learner_lost:
            self.learner_lost -= 1
            raise lost(self.policy, rank, method)
        return args[0]

    async def publish(self, *versions):
        for version in versions:
            async with self.sync.changing():
                await asyncio.sleep(0.5)  # the update
                await self.sync.publish(version)
