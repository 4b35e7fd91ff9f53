"""Chunks that wait for one model: who comes with whom, and what becomes of a failed call. Time is virtual."""

import asyncio

import pytest

from rlhf_ray.coordinator.gathering import MOST, Gathering
from rlhf_ray.errors import WorkerError
from tests.unit.coordinator.stand_ins import StandInGroup, team_of
from tests.unit.coordinator.virtual_time import run_in_virtual_time


class Model:
    """Answers each record with its own name, a second a call."""

    def __init__(self, workers=1, fails=()):
        self.calls, self.fails = [], fails
        self.group = StandInGroup("reference", self._answer, workers)
        self.gathering = Gathering(team_of(reference=self.group), self.group, "logprobs", "reference")

    async def _answer(self, rank, method, *records):
        self.calls.append((rank, records))
        await asyncio.sleep(1.0)
        if set(records) & set(self.fails):
            raise WorkerError("out of memory")
        answers = tuple(f"about {record}" for record in records)
        return answers if len(answers) > 1 else answers[0]

    async def ask(self, record, at=0.0):
        await asyncio.sleep(at)
        answer = await self.gathering.ask(record)
        return await answer.ref.value()


def ask_all(model, arrivals):
    """What each asker got, a record's name and time each."""

    async def ask():
        return await asyncio.gather(*(model.ask(*arrival) for arrival in arrivals), return_exceptions=True)

    return run_in_virtual_time(ask())


def test_what_comes_within_the_linger_shares_a_call_and_everyone_gets_its_own_answer():
    model = Model()
    assert ask_all(model, [("a", 0.0), ("b", 0.004), ("c", 0.5)]) == ["about a", "about b", "about c"]
    assert model.calls == [(0, ("a", "b")), (0, ("c",))]


def test_what_comes_while_the_model_works_waits_together():
    model = Model()
    assert ask_all(model, [("a", 0.0), ("b", 0.1), ("c", 0.9), ("d", 0.5)]) == [f"about {x}" for x in "abcd"]
    assert model.calls == [(0, ("a",)), (0, ("b", "d", "c"))]


def test_another_worker_serves_while_the_first_is_busy():
    model = Model(workers=2)
    ask_all(model, [("a", 0.0), ("b", 0.1), ("c", 0.2)])
    assert model.calls == [(0, ("a",)), (1, ("b",)), (0, ("c",))]


def test_no_call_grows_without_end():
    model = Model()
    ask_all(model, [(str(i), 0.0) for i in range(2 * MOST + 1)])
    assert [len(records) for _, records in model.calls] == [MOST, MOST, 1]


def test_a_failure_is_told_to_those_in_the_call_and_the_next_are_served():
    model = Model(fails="b")
    found = ask_all(model, [("a", 0.0), ("b", 0.0), ("c", 0.5)])
    assert [str(answer) for answer in found] == ["out of memory", "out of memory", "about c"]


def test_who_left_does_not_keep_the_others_from_their_answer():
    model = Model()

    async def leave():
        leaving, staying = asyncio.ensure_future(model.ask("a")), asyncio.ensure_future(model.ask("b"))
        await asyncio.sleep(0.5)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        return await staying

    assert run_in_virtual_time(leave()) == "about b"
