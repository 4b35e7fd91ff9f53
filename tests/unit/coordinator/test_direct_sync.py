"""Who takes part in a publication from GPU to GPU. Workers are stand-ins; what they send has tests of its own."""

import asyncio

from rlhf_ray.coordinator.audience import Audience
from rlhf_ray.coordinator.direct_sync import DirectSync
from rlhf_ray.errors import WorkerLost
from tests.unit.coordinator.stand_ins import StandInGroup, team_of


class Group(StandInGroup):
    """One whose workers are each their first process."""

    def incarnation(self, rank):
        return 1


def test_a_generator_that_is_lost_before_all_have_met_ends_nothing():
    async def generator(rank, method, *args):
        if method == "devices" and rank == 1:
            raise WorkerLost("generator/1 died in devices", "generator", 1, 1, "devices")
        return 2 if method == "devices" else None

    async def work():
        team = team_of(generators=Group("generator", generator, 3), policy=Group("policy_learner", learner))
        lost, crew = [], team.crew(team.generators)
        crew.on_lost = lambda _, error, __: lost.append(error.rank)
        audience = Audience(crew, range(3))
        await DirectSync("ipc", team).connect(audience)
        return team.generators.log, lost, audience.ranks

    async def learner(rank, method, *args):
        return None

    log, lost, ranks = asyncio.run(work())
    assert [rank for method, rank in log if method == "connect_weights"] == [0, 2]
    assert (lost, ranks) == ([1], [0, 2])
