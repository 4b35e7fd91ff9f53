"""Which prompts take the place of those without a score, whatever finished first: stand-ins in virtual time."""

import asyncio
from itertools import permutations

import pytest

from benchmarks.virtual_time import run_in_virtual_time
from rlhf_ray.coordinator.quarantine import Quarantine
from rlhf_ray.errors import WorkerError
from rlhf_ray.replay.ledger import Ledger
from rlhf_ray.replay.ledger_tables import LedgerFacts
from tests.unit.coordinator.harnesses import FIRST, ROWS, QuarantineHarness, saved

BAD = {FIRST[place] for place in (1, 4, 5, 8)}
"""One of the first chunk's prompts, both of the third's, and the first one that takes a place."""
BATCH = [FIRST[place] for place in (0, 11, 2, 3, 9, 10, 6, 7)]
"""By hand: 8 goes to the first chunk and 9, 10 to the third; then 8 has no score either, and 11 takes its place."""
NEXT = FIRST[12:20]
ORDERS = list(permutations(range(4)))


class Ordered(QuarantineHarness):
    """One whose chunks are scored in a given order: `turns` has each chunk's, by admission; a chunk that is made again
    takes the same time."""

    def __init__(self, config, summary, turns, **more):
        self._turns = turns
        super().__init__(config, summary, BAD, limit=0.5, **more)

    async def score(self, rank, method, rollouts, prompts):
        chunk = FIRST.index(rollouts[0]["keys"][-1].row) // 2
        await asyncio.sleep(0.1 * (1 + self._turns[chunk % len(self._turns)]))
        return await super().score(rank, method, rollouts, prompts)


@pytest.fixture(scope="module")
def ordered(ppo_config, summary):
    def build(turns, concurrency=None, staleness=0):
        config = ppo_config(prompts=8, chunk=2, steps=2, staleness=staleness)
        loop = config.coordinator.model_copy(update={"concurrency": concurrency})
        return Ordered(config.model_copy(update={"coordinator": loop}), summary, turns)

    return build


def two_batches(harness):
    async def run():
        batches = [[key.row for key in await harness.train()] for _ in range(2)]
        await harness.pipeline.close()
        return batches

    return run_in_virtual_time(run())


@pytest.mark.parametrize("concurrency", [None, 2, 4])
def test_at_staleness_0_the_same_prompts_come_to_the_same_places_in_whatever_order_chunks_fail(ordered, concurrency):
    """Those that are admitted while others have failed already (`concurrency`) among them."""
    for turns in ORDERS[:: 8 if concurrency else 3]:
        assert two_batches(ordered(turns, concurrency)) == [BATCH, NEXT], turns


@pytest.mark.parametrize("turns", [(0, 1, 2, 3), (3, 2, 1, 0)])
def test_where_timing_may_choose_nobody_waits_for_the_others(ordered, turns):
    batches = two_batches(ordered(turns, staleness=1))
    assert len({row for batch in batches for row in batch}) == 16
    assert not {row for batch in batches for row in batch} & BAD


def two_resumed_batches(harness, state, buffer, summaries, copy):
    facts = LedgerFacts.of(harness.pipeline.config.coordinator, harness.state.cursor)
    harness.ledger.close()
    harness.ledger = harness.pipeline.ledger = Ledger.resume(harness.ledger.path, copy, facts)
    harness.pipeline.quarantine = Quarantine(harness.ledger, harness.file, 0.5, ROWS, lambda _: None)

    async def go_on():
        refs = {place: f"experience {place}" for place in summaries}
        harness.state.load_state_dict(state, harness.buffer.load_state_dict(buffer, refs, summaries))
        harness.pipeline.resume()
        return [[key.row for key in await harness.train()] for _ in range(2)]

    return run_in_virtual_time(go_on())


@pytest.mark.parametrize("turns", ORDERS[::4])
def test_a_run_saved_between_a_failure_and_its_replacement_goes_on_as_if_it_had_not_been(ordered, tmp_path, turns):
    """The first chunk or the third has lost prompts, and others of the batch are under way."""
    harness, copy = ordered(turns), tmp_path / "copy.sqlite"

    async def fail_once():
        batch = asyncio.create_task(harness.pipeline.next_batch())
        while not harness.ledger.quarantined().samples:
            await asyncio.sleep(0.01)
        checkpoint = saved(harness, copy)
        batch.cancel()
        await asyncio.gather(batch, return_exceptions=True)
        await harness.pipeline.close()
        return checkpoint

    state, buffer, summaries = run_in_virtual_time(fail_once())
    assert sum(len(keys) for _, keys in state["in_flight"]) + 2 * len(summaries) < 8, "some prompts are not replaced"
    assert two_resumed_batches(ordered(turns[::-1]), state, buffer, summaries, copy) == [BATCH, NEXT]


@pytest.mark.parametrize("turns", [(0, 1, 2, 3), (3, 2, 1, 0)])
def test_a_run_saved_after_the_loss_of_its_scorers_goes_on_as_if_it_had_not_been(ordered, tmp_path, turns):
    """The third chunk has lost prompts. The first one has not been scored: it will lose one too, and comes first."""
    harness, copy = ordered(turns), tmp_path / "copy.sqlite"
    score = harness.score

    async def score_or_fail(rank, method, rollouts, prompts):
        if rollouts[0]["keys"][0].row == FIRST[0]:
            await asyncio.sleep(0.1 * (1 + turns[0]))
            raise WorkerError("the scorers cannot be kept alive", "reward")
        return await score(rank, method, rollouts, prompts)

    harness.roles.reward.answer = score_or_fail

    async def fail():
        with pytest.raises(WorkerError, match="cannot be kept alive"):
            await harness.pipeline.next_batch()
        checkpoint = saved(harness, copy)
        await harness.pipeline.close()
        return checkpoint

    assert two_resumed_batches(ordered(turns[::-1]), *run_in_virtual_time(fail()), copy) == [BATCH, NEXT]
