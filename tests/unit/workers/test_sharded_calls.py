"""Calls to ranks that hold a model together: all of them or none, in one order, and replaced together. Stand-ins in
virtual time."""

import asyncio

import pytest

from benchmarks.virtual_time import run_in_virtual_time
from rlhf_ray.errors import SampleError, WorkerError, WorkerLost
from rlhf_ray.roles.reward_scorer import RewardScorer
from rlhf_ray.workers.dispatcher import PEER_GRACE_S
from tests.unit.coordinator.losses import ReplacementHarness, lost

FOREVER_S = 1e6


class ShardedScorers(ReplacementHarness):
    """Four ranks, two for each of two models. `plan` gives what becomes of calls, each once: (rank, errors or seconds);
    others answer with their rank after a second."""

    def __init__(self, **plan):
        super().__init__(workers=4)
        self.plan = {int(rank[1:]): list(outcomes) for rank, outcomes in plan.items()}
        self.orders = {rank: [] for rank in range(4)}
        self.group.answer = self.behave
        self.group.replica = lambda rank: [rank - rank % 2, rank - rank % 2 + 1]
        self.dispatcher = type(self.dispatcher)(self.group, self.health)
        self.health.register(self.dispatcher.scheduler)

    async def behave(self, rank, method, *args):
        if method == "start":
            return rank
        self.orders[rank].append(args[0])
        outcome = self.plan[rank].pop(0) if self.plan.get(rank) else 1.0
        await asyncio.sleep(outcome if isinstance(outcome, float) else 0.5)
        if isinstance(outcome, str):
            raise lost(self.group, rank, method, outcome)
        if isinstance(outcome, Exception):
            raise outcome
        return rank

    async def ask(self, *names, work=1):
        async def one(name):
            call = await self.dispatcher.call(RewardScorer.score, name, work=work)
            return call.rank, await call.value()

        return await asyncio.gather(*map(one, names))


def test_all_ranks_of_a_model_make_a_call_and_the_first_one_answers():
    scorers = ShardedScorers()
    assert run_in_virtual_time(scorers.ask("a", "b")) == [(0, 0), (2, 2)]
    assert scorers.orders == {0: ["a"], 1: ["a"], 2: ["b"], 3: ["b"]}


def test_calls_to_one_model_follow_each_other_in_the_same_order_on_all_ranks():
    scorers = ShardedScorers(r0=[3.0, 0.1, 2.0], r1=[0.1, 5.0, 0.1])

    async def timed():
        began = asyncio.get_running_loop().time()
        await scorers.ask(*"abcdef")
        return asyncio.get_running_loop().time() - began

    assert run_in_virtual_time(timed()) == pytest.approx(3.0 + 5.0 + 2.0)
    assert scorers.orders[0] == scorers.orders[1] and scorers.orders[2] == scorers.orders[3]
    assert len(scorers.orders[0]) == len(scorers.orders[2]) == 3


def test_a_call_that_waits_for_its_turn_is_not_made_to_ranks_that_were_lost_meanwhile():
    scorers = ShardedScorers(r0=["died"], r1=[FOREVER_S])
    assert run_in_virtual_time(scorers.ask("a", "b", "c")) == [(2, 2)] * 3
    assert scorers.orders[0] == ["a"] and sorted(scorers.orders[2]) == ["a", "b", "c"]


@pytest.mark.parametrize("hurt", [0, 1])
@pytest.mark.parametrize("error", ["died", WorkerError("connection closed", "generator")])
def test_a_lost_rank_takes_the_others_of_its_model_with_it_and_the_call_is_repeated(hurt, error):
    """A rank that raises what is no role's error leaves the others waiting, in a pass without it."""
    plan = {f"r{hurt}": [error], f"r{1 - hurt}": [FOREVER_S]}
    scorers = ShardedScorers(**plan)

    async def asked():
        answer = await scorers.ask("a")
        await asyncio.sleep(10)
        return answer

    assert run_in_virtual_time(asked()) == [(2, 2)]
    assert scorers.group.incarnations == [2, 2, 1, 1] and scorers.group.given_up == [0, 1]
    assert run_in_virtual_time(scorers.ask("b")) == [(0, 0)], "it is back"
    (told, back) = scorers.said
    assert f"it is restarted with generator/{1 - hurt}" in told and "generator/0 is back" in back


def test_a_loss_that_follows_another_rank_s_error_is_the_reason_that_is_told():
    scorers = ShardedScorers(r0=[WorkerError("connection closed", "generator")], r1=["died"])
    assert run_in_virtual_time(scorers.ask("a")) == [(2, 2)]
    assert scorers.said[0].startswith("generator/1 died in score")


@pytest.mark.parametrize("others", [[1.0], [SampleError("no score")]])
def test_the_role_s_own_error_is_raised_and_nobody_is_replaced(others):
    scorers = ShardedScorers(r0=[SampleError("no score")], r1=others)
    with pytest.raises(SampleError, match="no score"):
        run_in_virtual_time(scorers.ask("a"))
    assert scorers.group.incarnations == [1] * 4 and not scorers.said


def test_an_argument_that_one_rank_lost_is_produced_again_and_the_ranks_are_replaced():
    scorers = ShardedScorers(r0=["result"], r1=[FOREVER_S])

    async def asked():
        with pytest.raises(WorkerLost) as error:
            await scorers.ask("a")
        await asyncio.sleep(PEER_GRACE_S + 5)
        return error.value.kind

    assert run_in_virtual_time(asked()) == "result"
    assert scorers.group.incarnations == [2, 2, 1, 1]
    both = ShardedScorers(r0=["result"], r1=["result"])
    with pytest.raises(WorkerLost):
        run_in_virtual_time(both.ask("a"))
    assert both.group.incarnations == [1] * 4, "neither has begun"
