"""Which nodes a run cannot be without, and what it does when they are about to go."""

import asyncio
from types import SimpleNamespace

import pytest

from rlhf_ray.coordinator.stop import StopRequest
from rlhf_ray.observability.background_task import background_task
from rlhf_ray.workers import node_drain
from rlhf_ray.workers.node_drain import DrainWatch


class Group:
    """Workers by rank, each on a node; None has not started."""

    def __init__(self, role, *nodes):
        self.role, self._nodes = role, nodes

    def __len__(self):
        return len(self._nodes)

    @property
    def ranks(self):
        return list(range(len(self)))

    def processes(self, rank):
        return self._nodes[rank] and SimpleNamespace(node=self._nodes[rank])


@pytest.fixture
def heed(monkeypatch):
    """heed({node: seconds left}, ...) -> (who asked to stop, warnings), after a look at each in turn."""
    monkeypatch.setattr(node_drain, "LOOK_S", 0.0)
    monkeypatch.setattr(node_drain, "own_node", lambda: "head")

    def run(*looks):
        told, seen, enough = [], iter(looks), asyncio.Event()

        def draining():
            try:
                return next(seen)
            except StopIteration:
                loop.call_soon_threadsafe(enough.set)
                return looks[-1]

        async def heeding():
            nonlocal loop
            loop, stop = asyncio.get_running_loop(), StopRequest(lambda _: None)
            groups = [Group("policy_learner", "a", "b")], [Group("generator", "b", "c", None)]
            async with background_task("drains", DrainWatch(stop.ask, told.append, *groups).run):
                await asyncio.wait_for(enough.wait(), 10)
            return stop.requested

        loop = None
        monkeypatch.setattr(node_drain, "draining_nodes", draining)
        return asyncio.run(heeding()), told

    return run


def test_a_learner_s_node_that_goes_away_ends_the_run_and_is_told_once(heed):
    drained = {"b": 29.6, "elsewhere": None}
    asked, told = heed({}, drained, drained)
    assert asked == "the drain of its node"
    assert told == ["the node of policy_learner/1 is being drained and goes away in 30 s: the run is saved and ends"]


def test_so_does_the_driver_s_own(heed):
    asked, told = heed({"head": None})
    assert asked == "the drain of its node" and told[0].startswith("the node of the driver is being drained and goes")


def test_other_workers_are_waited_out(heed):
    asked, told = heed({"c": 100.0})
    assert asked is None and told[0].startswith("the node of generator/1 is being drained and goes away in 100 s; they")


def test_a_learner_that_starts_on_a_node_which_is_being_drained_already_ends_the_run_too(heed, monkeypatch):
    learner, started = Group("policy_learner", None), []
    monkeypatch.setattr(Group, "processes", lambda self, rank: SimpleNamespace(node="b") if (
        self.role == "generator" or started) else None)

    def drained():
        started.extend([True] * (len(told) > 0))
        return {"b": None}

    told, stop = [], StopRequest(lambda _: None)
    monkeypatch.setattr(node_drain, "draining_nodes", drained)

    async def run():
        watch = DrainWatch(stop.ask, told.append, [learner], [Group("generator", "b")])
        async with background_task("drains", watch.run):
            while stop.requested is None:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 10))
    assert len(told) == 2 and "generator/0" in told[0] and "policy_learner/0" in told[1], told


def test_a_look_that_fails_is_made_again(heed, monkeypatch):
    looks = iter([OSError("no answer"), {"head": 5.0}])

    class Failing(dict):
        def items(self):
            found = next(looks, {})
            if isinstance(found, Exception):
                raise found
            return found.items()

    assert heed(Failing(), Failing())[0] == "the drain of its node"
