"""A coroutine is run to its end in any case, and a loop that runs already goes on as before."""

import asyncio
import signal

import pytest

from rlhf_ray.internals.asyncio import run_coroutine


async def number():
    await asyncio.sleep(0)
    return 7


def test_without_a_loop_and_within_one():
    assert run_coroutine(number()) == 7

    async def cell():
        before = asyncio.get_running_loop(), asyncio.current_task()
        other = asyncio.create_task(number())
        found = run_coroutine(number()), run_coroutine(number())
        assert (asyncio.get_running_loop(), asyncio.current_task()) == before
        return *found, await other

    assert asyncio.run(cell()) == (7, 7, 7)


def test_an_error_comes_out_and_the_outer_loop_goes_on():
    async def fails():
        raise KeyError("inner")

    async def cell():
        with pytest.raises(KeyError, match="inner"):
            run_coroutine(fails())
        return await number()

    assert asyncio.run(cell()) == 7


def test_a_signal_is_handled_in_the_inner_loop():
    async def waits():
        asked = asyncio.Event()
        loop = asyncio.get_running_loop()
        before = signal.signal(signal.SIGTERM, lambda *_: loop.call_soon_threadsafe(asked.set))
        try:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.wait_for(asked.wait(), 10)
        finally:
            signal.signal(signal.SIGTERM, before)
        return "asked"

    async def cell():
        return run_coroutine(waits())

    assert asyncio.run(cell()) == "asked"
