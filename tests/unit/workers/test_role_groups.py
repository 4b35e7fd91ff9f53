"""Who is called next, and where working time is noted."""

import asyncio

from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.roles.reference_scorer import ReferenceScorer
from rlhf_ray.roles.reward_scorer import RewardScorer
from rlhf_ray.workers.scheduler import LeastLoadedScheduler
from tests.unit.coordinator.stand_ins import StandInGroup, role_groups_of, silent


def test_the_least_loaded_worker_is_next_and_the_lowest_among_equals():
    scheduler = LeastLoadedScheduler(StandInGroup("generators", silent, workers=3))

    async def run():
        assert [await scheduler.acquire(work) for work in (5, 2, 3)] == [0, 1, 2]
        assert await scheduler.acquire(4) == 1  # loads 5, 2, 3 -> 5, 6, 3
        assert await scheduler.acquire(2) == 2  # -> 5, 6, 5
        assert await scheduler.acquire(1) == 0  # 0 and 2 are equal
        scheduler.release(1, 6)
        assert await scheduler.acquire(1) == 1

    asyncio.run(run())


def test_a_team_counts_its_workers_by_role():
    roles = role_groups_of(generators=StandInGroup("generators", silent, workers=2))
    assert roles.workers() == {"generators": 2, "reference": 1, "reward": 1, "assembler": 1, "policy": 1, "critic": 1}


def test_without_a_critic_nobody_speaks_of_one():
    roles = role_groups_of(critic=None)
    assert [group.role for group in roles.learners()] == ["policy"]
    assert "critic" not in roles.workers()
    assert [group.role for group in role_groups_of().learners()] == ["policy", "critic"]


def test_without_a_reference_nobody_speaks_of_one():
    roles = role_groups_of(reference=None)
    assert [group.role for group in roles.groups()] == ["generators", "reward", "assembler", "policy", "critic"]
    assert "reference" not in roles.workers()


def test_the_scorers_are_those_that_the_run_has():
    roles = role_groups_of(reference=None)
    assert [row.cls for row in roles.scorers()] == [RewardScorer]
    assert [row.cls for row in role_groups_of().scorers()] == [ReferenceScorer, RewardScorer]


def test_working_time_is_noted_under_role_and_phase():
    async def run():
        roles = role_groups_of()
        began = roles.clock.now()
        await roles.done(roles.policy.call(0, PolicyLearner.update), "policy_update")
        return roles.clock, began

    clock, began = asyncio.run(run())
    spans = clock.work(began, clock.now())
    assert {(span.role, span.worker) for span in spans} == {("policy", 0), ("phase:policy_update", 0)}
    assert all(span.start >= began for span in spans)
