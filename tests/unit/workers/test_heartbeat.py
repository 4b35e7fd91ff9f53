"""When a learner that gives no sign of life is given up: stand-ins that count, or do not. (Real ones that are stopped:
tests/cluster/test_lost_learners.)"""

import asyncio
from types import SimpleNamespace

import pytest

from rlhf_ray.workers import detectors
from rlhf_ray.workers.detectors import HeartbeatDetector


class Ranks:
    """Two ranks whose counts are `count(rank, looks so far)`; incarnations change when they are set."""

    role = "policy_learner"

    def __init__(self, count):
        self._count, self.looks, self.given_up, self.incarnations = count, 0, [], [1, 1]

    ranks = (0, 1)

    def incarnation(self, rank):
        return self.incarnations[rank]

    async def heartbeats(self, rank):
        self.looks += rank
        return self._count(rank, self.looks)

    def silent(self, group, rank, seconds):
        assert group is self
        self.given_up.append((rank, seconds))


@pytest.fixture
def watch(monkeypatch):
    """watch(ranks, looks, heartbeat_timeout_s=10.0, pause=None): check `looks` times, a second apart; this process is
    stopped for an hour before the check `pause`."""

    def run(ranks, looks, heartbeat_timeout_s=10.0, pause=None):
        clock = SimpleNamespace(now=0.0)

        async def sleep(seconds):
            clock.now += seconds + 3600 * (ranks.looks == pause)
            if ranks.looks >= looks:
                raise asyncio.CancelledError

        monkeypatch.setattr(detectors, "time", SimpleNamespace(monotonic=lambda: clock.now))
        monkeypatch.setattr(detectors, "asyncio", SimpleNamespace(sleep=sleep, gather=asyncio.gather))
        detector = HeartbeatDetector(lambda: [(ranks, rank) for rank in ranks.ranks], heartbeat_timeout_s, ranks.silent)
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(detector.run())
        return [rank for rank, _ in ranks.given_up]

    return run


def test_one_whose_count_stands_still_for_a_lease_is_given_up_and_the_other_is_not(watch):
    ranks = Ranks(lambda rank, looks: looks if rank == 0 else min(looks, 5))
    assert set(watch(ranks, looks=20)) == {1}
    assert ranks.given_up[0][1] == pytest.approx(11.0)


def test_who_has_not_begun_to_count_is_not_silent(watch):
    assert watch(Ranks(lambda rank, looks: None), looks=40) == []


def test_nobody_is_blamed_for_the_time_in_which_this_process_itself_stood_still(watch):
    assert watch(Ranks(lambda rank, looks: looks - (looks == 8)), looks=20, pause=7) == []


def test_a_successor_begins_anew(watch):
    ranks = Ranks(lambda rank, looks: 3)
    ranks.incarnation = lambda rank: 1 + ranks.looks // 8
    assert watch(ranks, looks=30) == []


def test_a_look_that_fails_says_nothing_of_others(watch):
    def count(rank, looks):
        if rank == 0:
            raise ConnectionError("the control service restarts")
        return 5

    assert set(watch(Ranks(count), looks=20)) == {1}
