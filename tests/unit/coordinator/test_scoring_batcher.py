"""Chunks that go on together: who comes with whom, how long they wait, what becomes of a failure. Time is virtual."""

import asyncio

import pytest

from benchmarks.virtual_time import run_in_virtual_time
from rlhf_ray.coordinator.scoring_batcher import MAX_BATCH, ScoringBatcher
from rlhf_ray.errors import WorkerError


class Trip:
    """A scoring call of a second, which fails for some items."""

    def __init__(self, fails=()):
        self.left, self.fails = [], fails
        self.batcher = ScoringBatcher(self._go)

    async def _go(self, items):
        self.left.append((round(asyncio.get_running_loop().time(), 3), list(items)))
        await asyncio.sleep(1.0)
        if set(items) & set(self.fails):
            raise WorkerError("out of memory")

    async def join(self, item, at=0.0, linger=0.1):
        await asyncio.sleep(at)
        await self.batcher.submit(item, linger)
        return f"{item} at {asyncio.get_running_loop().time():.2f}"


def join_all(trip, *arrivals):
    """When each was scored who joined: a name, a time and a linger each."""

    async def join():
        return await asyncio.gather(*(trip.join(*arrival) for arrival in arrivals), return_exceptions=True)

    return run_in_virtual_time(join())


def test_those_who_come_within_the_first_ones_linger_go_together_and_end_together():
    trip = Trip()
    assert join_all(trip, ("a", 0.0), ("b", 0.09), ("c", 0.11)) == ["a at 1.10", "b at 1.10", "c at 1.21"]
    assert trip.left == [(0.1, ["a", "b"]), (0.21, ["c"])]


def test_the_shortest_linger_says_when_a_batch_starts():
    trip = Trip()
    join_all(trip, ("a", 0.0, 1.0), ("b", 0.1, 0.2), ("c", 0.2, 5.0))
    assert trip.left == [(0.3, ["a", "b", "c"])]


def test_without_linger_everyone_goes_alone_at_once():
    trip = Trip()
    join_all(trip, *((name, 0.0, 0.0) for name in "abc"))
    assert trip.left == [(0.0, ["a"]), (0.0, ["b"]), (0.0, ["c"])]


def test_a_full_batch_does_not_wait():
    trip = Trip()
    join_all(trip, *((str(i), 0.0) for i in range(MAX_BATCH + 1)))
    assert trip.left == [(0.0, [str(i) for i in range(MAX_BATCH)]), (0.1, [str(MAX_BATCH)])]


def test_a_failure_is_told_to_the_whole_batch_and_to_no_other():
    found = join_all(Trip(fails="b"), ("a", 0.0), ("b", 0.0), ("c", 0.5))
    assert [str(result) for result in found] == ["out of memory", "out of memory", "c at 1.60"]
    assert found[0] is found[1]


@pytest.mark.parametrize("at", [0.05, 0.5])
def test_who_leaves_does_not_keep_the_others_from_their_results(at):
    """Before the company left, or after."""
    trip = Trip()

    async def leave():
        leaving, staying = asyncio.ensure_future(trip.join("a")), asyncio.ensure_future(trip.join("b"))
        await asyncio.sleep(at)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        return await staying

    assert run_in_virtual_time(leave()) == "b at 1.10"
    assert trip.left == [(0.1, ["b"] if at < 0.1 else ["a", "b"])]


def test_nothing_leaves_after_closing():
    trip = Trip()

    async def close():
        waiting = asyncio.ensure_future(trip.join("a"))
        await asyncio.sleep(0.05)
        trip.batcher.close()
        waiting.cancel()
        await asyncio.sleep(1.0)

    run_in_virtual_time(close())
    assert trip.left == []
