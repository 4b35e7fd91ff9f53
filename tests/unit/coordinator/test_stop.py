"""Signals to this very process, inside its event loop."""

import asyncio
import os
import signal

import pytest

from rlhf_ray.coordinator.stop import StopRequest


@pytest.fixture(autouse=True)
def handlers_stay_as_they_are():
    names = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(name) for name in names]
    yield
    for name, handler in zip(names, before, strict=True):
        signal.signal(name, handler)


async def kill_and_look(number):
    os.kill(os.getpid(), number)
    for _ in range(100):
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_the_first_signal_is_a_request(name):
    said = []

    async def run():
        stop = StopRequest(said.append)
        with stop.listening():
            assert stop.requested is None
            await kill_and_look(getattr(signal, name))
            return stop.requested

    assert asyncio.run(run()) == name
    assert said == [f"{name}: finishing this step, then saving; once more stops at once"]


def test_the_second_signal_ends_the_work():
    said, reached = [], []

    async def run():
        stop = StopRequest(said.append)
        with stop.listening():
            await kill_and_look(signal.SIGTERM)
            reached.append("after the first")
            await kill_and_look(signal.SIGINT)
            reached.append("after the second")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert reached == ["after the first"] and len(said) == 1


def test_afterwards_signals_are_the_worlds_again():
    async def run():
        stop = StopRequest(lambda _: None)
        with stop.listening():
            pass
        caught = []
        signal.signal(signal.SIGTERM, lambda *_: caught.append("world"))
        await kill_and_look(signal.SIGTERM)
        return stop.requested, caught

    assert asyncio.run(run()) == (None, ["world"])
