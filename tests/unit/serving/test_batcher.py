"""Rows of concurrent callers become few passes, each caller gets their own scores, and a full queue says so."""

import asyncio
import threading
import time

import numpy as np
import pytest

from rlhf_ray.models.classifier import EncodedRow
from rlhf_ray.serving.batcher import Batcher, QueueFullError


class Model:
    """The score of a row is its first token; remembers the batches and can be held back."""

    def __init__(self):
        self.batches, self.threads, self.gate, self.begun = [], set(), threading.Event(), threading.Event()
        self.gate.set()

    def __call__(self, rows):
        self.begun.set()
        self.gate.wait(10)
        self.threads.add(threading.get_ident())
        self.batches.append([len(row.ids) for row in rows])
        if any(row.ids[0] == 666 for row in rows):
            raise ValueError("this model dislikes 666")
        return np.array([row.ids[0] for row in rows], np.float32)


def rows(*firsts, length=4):
    return [EncodedRow(np.full(length, first, np.int32)) for first in firsts]


def run(callers, **settings):
    """(what the callers came to, model) with a running batcher; `callers` gets batcher and model."""
    model = Model()

    async def main():
        batcher = Batcher(model, **{"max_tokens": 40, "linger_s": 0.02, "max_waiting": 100, **settings})
        running = asyncio.create_task(batcher.run())
        try:
            return await callers(batcher, model)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    return asyncio.run(main()), model


def test_callers_at_the_same_time_share_a_pass_and_get_their_own_scores():
    async def callers(batcher, _):
        answers = await asyncio.gather(*(batcher.score(rows(i, i + 100)) for i in range(5)))
        return [a.tolist() for a in answers], batcher.samples, batcher.forward_passes

    (answers, samples, passes), model = run(callers)
    assert answers == [[i, i + 100] for i in range(5)]
    assert (samples, passes, len(model.batches)) == (10, 1, 1)


def test_what_arrives_during_a_pass_makes_the_next_one():
    async def callers(batcher, model):
        model.gate.clear()
        first = asyncio.create_task(batcher.score(rows(1)))
        await asyncio.sleep(0.06)
        others = [asyncio.create_task(batcher.score(rows(i))) for i in range(2, 8)]
        await asyncio.sleep(0.03)
        model.gate.set()
        return [a.tolist() for a in await asyncio.gather(first, *others)]

    answers, model = run(callers)
    assert answers == [[i] for i in range(1, 8)] and list(map(len, model.batches)) == [1, 6]


def test_no_pass_is_over_the_budget_and_the_first_come_is_first_served():
    async def callers(batcher, _):
        long = [row for n, length in enumerate((10, 30, 5, 5, 40, 1)) for row in rows(n, length=length)]
        return (await batcher.score(long)).tolist()

    answer, model = run(callers)
    assert answer == [0, 1, 2, 3, 4, 5]
    assert model.batches == [[10], [30], [5, 5], [40], [1]]
    assert all(len(batch) * max(batch) <= 40 for batch in model.batches)


def test_the_linger_is_bounded_and_a_full_batch_does_not_linger():
    async def callers(batcher, _):
        began = time.monotonic()
        await batcher.score(rows(1))
        alone = time.monotonic() - began
        await batcher.score(rows(*range(11)))
        return alone

    alone, model = run(callers, linger_s=0.3)
    assert alone >= 0.3 and list(map(len, model.batches)) == [1, 10, 1]

    async def full(batcher, model):
        waiting = asyncio.create_task(batcher.score(rows(*range(11))))
        while not model.batches:  # the rest lingers for days
            await asyncio.sleep(0.01)
        waiting.cancel()
        return list(map(len, model.batches))

    assert run(full, linger_s=1e6)[0] == [10]


def test_one_thread_computes():
    async def callers(batcher, _):
        await asyncio.gather(*(batcher.score(rows(i, length=40)) for i in range(6)))

    _, model = run(callers)
    assert len(model.batches) == 6 and len(model.threads) == 1
    assert threading.get_ident() not in model.threads


def test_a_full_queue_refuses_and_says_for_how_long():
    async def callers(batcher, model):
        model.gate.clear()
        first = asyncio.create_task(batcher.score(rows(1)))
        await asyncio.to_thread(model.begun.wait, 10)
        second = asyncio.create_task(batcher.score(rows(2, 3, 4)))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="3 samples are queued already") as caught:
            await batcher.score(rows(5, 6))
        third = asyncio.create_task(batcher.score(rows(7)))
        model.gate.set()
        return caught.value.retry_after, [a.tolist() for a in await asyncio.gather(first, second, third)]

    (retry_after, answers), _ = run(callers, max_waiting=4)
    assert 1 <= retry_after <= 60 and answers == [[1], [2, 3, 4], [7]]


def test_a_caller_who_leaves_takes_their_rows_along():
    async def callers(batcher, model):
        model.gate.clear()
        first = asyncio.create_task(batcher.score(rows(1)))
        await asyncio.to_thread(model.begun.wait, 10)
        second, third = (asyncio.create_task(batcher.score(rows(i, length=40))) for i in (2, 3))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        model.gate.set()
        return [a.tolist() for a in await asyncio.gather(first, third)], batcher.waiting

    (answers, waiting), model = run(callers)
    assert answers == [[1], [3]] and waiting == 0 and len(model.batches) == 2


def test_a_pass_that_fails_fails_its_callers_alone():
    async def callers(batcher, _):
        bad = batcher.score(rows(666, length=40))
        good = batcher.score(rows(1, length=40))
        return await asyncio.gather(bad, good, return_exceptions=True)

    (bad, good), _ = run(callers)
    assert isinstance(bad, ValueError) and good.tolist() == [1]
