"""Which prompts take the place of those whose scores are equal, whatever finished first: stand-ins in virtual time."""

import asyncio
from collections import Counter
from contextlib import closing
from inspect import signature
from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.virtual_time import run_in_virtual_time
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.quarantine import Quarantine
from rlhf_ray.coordinator.step_metrics import Drawn
from rlhf_ray.records import SampleKey, Sifted
from rlhf_ray.replay.audit import audit, counts
from rlhf_ray.replay.chunk import Chunk
from rlhf_ray.replay.ledger import Ledger, open_for_reading
from rlhf_ray.replay.ledger_tables import LedgerFacts
from rlhf_ray.roles.assembler import Assembler
from tests.unit.coordinator.harnesses import FIRST, ROWS, PipelineHarness, QuarantineHarness, saved
from tests.unit.coordinator.stand_ins import role_groups_of

EQUAL = {FIRST[place] for place in (1, 4, 5, 8)}
"""One of the first chunk's prompts, both of the third's, and the first one that takes a place."""
BATCH = [FIRST[place] for place in (0, 11, 2, 3, 9, 10, 6, 7)]
"""By hand: 8 goes to the first chunk and 9, 10 to the third; then 8 has equal scores, too, and 11 takes its place."""
NEXT = FIRST[12:20]
ORDERS = list(permutations(range(4)))


def config_of(staleness=0, draws=10, steps=2):
    """Batches of 8 prompts in chunks of two, with two samples each."""
    return PPOConfig(
        model={"path": "m"}, rewards={"main": {"type": "model", "path": "r"}}, prompts={"path": "p"},
        run={"steps": steps, "seed": 5}, generator={"chunk": 4},
        algorithm={"estimator": "grpo", "mini_batches": 1, "dynamic_sampling": {"max_batches": draws}},
        coordinator={"prompts_per_step": 8, "samples_per_prompt": 2, "max_staleness": staleness})


class DynamicHarness(PipelineHarness):
    """A pipeline in which all samples of some rows have the score 1. Chunks are scored in a given order: `turns` has
    each one's, by admission."""

    def __init__(self, config, summary, turns=(0,), equal=frozenset(EQUAL), **more):
        self.turns, self.equal, self.drawn = turns, equal, Counter()
        super().__init__(config, summary, **more)
        self.ledger.close()
        self.ledger.path.unlink()
        facts = LedgerFacts.of(config.coordinator, self.state.cursor, filters=True)
        self.ledger = self.pipeline.ledger = Ledger.create(self.ledger.path, facts)

    async def score(self, rank, method, rollouts, prompts):
        place = FIRST.index(rollouts[0]["keys"][-1].row)
        await asyncio.sleep(0.1 * (1 + self.turns[place // 2 % len(self.turns)]))
        self.drawn.update(key.row for rollout in rollouts for key in rollout["keys"])
        return await super().score(rank, method, rollouts, prompts)

    async def assemble(self, rank, method, *arguments, **columns):
        if method == "sift":
            return [self.sifted(keys) for keys in arguments[0]]
        if method == "keep_samples":
            signature(Assembler.keep_samples).bind(None, *arguments, **columns)
            kept = [{**rollout, "keys": [rollout["keys"][number] for number in numbers]}
                    for numbers, rollout in zip(arguments[0], columns["rollouts"], strict=True) if numbers]
            return *kept, "rewards", "reference"
        return await super().assemble(rank, method, *arguments, **columns)

    def sifted(self, keys):
        kept = [number for number, key in enumerate(keys) if key.row not in self.equal]
        return Sifted(kept, {"score": [1.0] * (len(keys) - len(kept))})

    async def batch(self):
        """Rows of the next batch, each once, and what was drawn for it."""
        lease = await asyncio.wait_for(self.pipeline.next_batch(), 1000)
        self.buffer.ack(lease, self.state.step)
        self.ledger.consumed(lease.keys, self.state.step + 1)
        self.state.step += 1
        self.version = self.state.published = self.state.step
        self.pipeline.return_evicted(self.buffer.evict(self.state.step))
        assert all(lease.keys[at].row == lease.keys[at + 1].row for at in range(0, len(lease.keys), 2))
        return [key.row for key in lease.keys[::2]], Drawn.of(lease.chunks, 2)


@pytest.fixture
def dynamic(summary):
    return lambda turns=(0,), staleness=0, draws=10, **more: DynamicHarness(
        config_of(staleness, draws), summary, turns, **more)


def batches(harness, count=2):
    async def run():
        made = [await harness.batch() for _ in range(count)]
        await harness.pipeline.close()
        return made

    return run_in_virtual_time(run())


def problems(harness):
    with closing(open_for_reading(harness.ledger.path)) as db:
        return [problem.invariant for problem in audit(db, ended=False)], counts(db)


def test_at_staleness_0_the_same_prompts_come_to_the_same_places_in_whatever_order_chunks_are_scored(dynamic):
    for turns in ORDERS[::3]:
        harness = dynamic(turns)
        assert [rows for rows, _ in batches(harness)] == [BATCH, NEXT], turns
        broken, states = problems(harness)
        assert broken == [] and (states["filtered"], states["consumed"]) == (8, 32)


def test_what_was_drawn_for_a_batch_is_counted_with_its_scores(dynamic):
    (_, first), (_, second) = batches(dynamic())
    assert first.filtered == {"score": [1.0] * 8} and second.filtered == {}
    assert first.metrics == {"dynamic/drawn_per_kept": 12 / 8, "dynamic/filtered": 4.0, "dynamic/filled": 0.0}
    assert second.metrics["dynamic/drawn_per_kept"] == 1


@pytest.mark.parametrize("draws", [2, 3])
def test_what_is_drawn_last_for_a_place_is_kept_whatever_its_scores(dynamic, draws):
    """The first chunk's second prompt has equal scores, and so has all that can take its place."""
    harness = dynamic(draws=draws, equal={FIRST[1], *FIRST[8:]})
    (rows, drawn), = batches(harness, 1)
    assert rows == [FIRST[0], FIRST[6 + draws], *FIRST[2:8]]
    assert drawn.metrics["dynamic/filtered"] == draws - 1
    assert sum(harness.drawn.values()) == 2 * (8 + draws - 1)


def test_prompts_are_filtered_without_a_reference_too(dynamic):
    """As with the preset dapo, whose runs have none."""
    harness = dynamic()
    harness.roles = role_groups_of(generators=harness.generators, policy=harness.policy, reward=harness.score,
                                   reference=None, critic=None, assembler=harness.assemble)
    harness.pipeline = harness.pipeline_of(harness.pipeline.config, harness.roles)
    assert [rows for rows, _ in batches(harness)] == [BATCH, NEXT]


def test_filled_places_are_counted_by_the_scores_of_the_batch(dynamic, summary):
    class Flat(DynamicHarness):
        async def assemble(self, rank, method, *arguments, **columns):
            made = await super().assemble(rank, method, *arguments, **columns)
            if method == "assemble":
                for rollout, one in zip(columns["rollouts"], made[-1], strict=True):
                    flat = np.array([key.row in self.equal for key in rollout["keys"]])
                    one.scores[flat] = 1.0
            return made

    harness = Flat(config_of(draws=2), summary, equal={FIRST[1], *FIRST[8:]})
    (_, drawn), = batches(harness, 1)
    assert drawn.metrics == {"dynamic/drawn_per_kept": 9 / 8, "dynamic/filtered": 1.0, "dynamic/filled": 1.0}


def test_a_prompt_whose_components_differ_is_not_filled_although_its_scores_are_equal():
    """As with GDPO: of three prompts the second differs in a component, the third in its score alone."""
    summary = SimpleNamespace(scores=np.array([1, 1, 2, 2, 0, 3], np.float32), components={
        "a": np.array([1, 1, 0, 2, 1, 1], np.float32), "b": np.array([0, 0, 2, 0, 5, 5], np.float32)})
    chunk = Chunk.outside([SampleKey(0, row, sample) for row in range(3) for sample in range(2)])
    chunk.summary = summary
    assert Drawn.of([chunk], 2).metrics["dynamic/filled"] == 2
    assert Drawn.of([chunk], 2, ["a", "b"]).metrics["dynamic/filled"] == 2
    assert Drawn.of([chunk], 2, ["b"]).metrics["dynamic/filled"] == 2
    summary.components["a"][0] = 7
    assert Drawn.of([chunk], 2, ["a", "b"]).metrics["dynamic/filled"] == 1


def resumed(harness, state, buffer, summaries, copy, count=2):
    facts = LedgerFacts.of(harness.pipeline.config.coordinator, harness.state.cursor, filters=True)
    harness.ledger.close()
    harness.ledger = harness.pipeline.ledger = Ledger.resume(harness.ledger.path, copy, facts)

    async def go_on():
        refs = {place: f"experience {place}" for place in summaries}
        harness.state.load_state_dict(state, harness.buffer.load_state_dict(buffer, refs, summaries))
        harness.pipeline.resume()
        return [await harness.batch() for _ in range(count)]

    return run_in_virtual_time(go_on())


@pytest.mark.parametrize("filtered", [2, 8])
@pytest.mark.parametrize("turns", ORDERS[::5])
def test_a_run_saved_within_a_refill_goes_on_as_if_it_had_not_been(dynamic, tmp_path, turns, filtered):
    """As when the scorers are lost: some prompts have left, and those in their places may not be scored yet."""
    harness, copy = dynamic(turns), tmp_path / "copy.sqlite"

    async def until_filtered():
        batch = asyncio.create_task(harness.pipeline.next_batch())
        while counts(harness.ledger._db)["filtered"] < filtered:
            await asyncio.sleep(0.01)
        checkpoint = saved(harness, copy)
        batch.cancel()
        await asyncio.gather(batch, return_exceptions=True)
        await harness.pipeline.close()
        return checkpoint

    state, buffer, summaries = run_in_virtual_time(until_filtered())
    again = dynamic(turns[::-1])
    (first, drawn), (second, _) = resumed(again, state, buffer, summaries, copy)
    assert [first, second] == [BATCH, NEXT]
    assert drawn.metrics["dynamic/filtered"] == 4 and problems(again)[0] == []


class WithQuarantine(QuarantineHarness, DynamicHarness):
    """Some prompts have no score; `slow`: the prompt, by its place in the order of drawing, that is scored late."""

    def __init__(self, config, summary, bad, slow, equal):
        self.slow = slow
        super().__init__(config, summary, bad, limit=0.9, equal=equal)
        self.pipeline.quarantine = Quarantine(self.ledger, self.file, 0.9, ROWS, self.warnings.append)

    async def score(self, rank, method, rollouts, prompts):
        await asyncio.sleep(5.0 if rollouts[0]["keys"][0].row == FIRST[self.slow] else 0.1)
        return await super().score(rank, method, rollouts, prompts)


@pytest.mark.parametrize("slow", [8, 10])
def test_the_rooms_of_quarantined_and_of_filtered_prompts_of_a_chunk_do_not_depend_on_timing(summary, slow):
    """Of a chunk of 8 prompts, 0 and 1 have no score and 2 and 3 equal ones. By hand: 8 and 9 take the places of the
    former, and 10 and 11 those of the latter. 8 and 10 have equal scores, too; 12 takes the place of 8, and 13, drawn
    third for its place and so kept, that of 10. 12 has equal scores, and 14 takes its place."""
    given = config_of(draws=3).model_dump(exclude_unset=True)
    config = PPOConfig(**{**given, "generator": {"chunk": 16}})
    equal = {FIRST[place] for place in (2, 3, 8, 10, 12, 13, 14, 15)}
    harness = WithQuarantine(config, summary, FIRST[:2], slow, equal)
    (rows, _), = batches(harness, 1)
    assert [FIRST.index(row) for row in rows] == [4, 5, 6, 7, 9, 14, 11, 13]
    assert problems(harness)[0] == []


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_no_sample_grows_too_old_while_the_places_beside_it_are_filled(dynamic, staleness, seed):
    """Half of the prompts are filtered, at random times; the ledger's audit and the buffer check the bound."""
    equal = {row for place, row in enumerate(FIRST) if (place + seed) % 2}
    harness = dynamic(tuple(np.random.default_rng(seed).permutation(7)), staleness, draws=99, equal=equal, seed=seed)
    harness.pipeline.config = config_of(staleness, draws=99, steps=5)
    made = batches(harness, 5)
    broken, states = problems(harness)
    assert broken == [] and states["consumed"] == 5 * 16
    assert not any(row in equal for rows, _ in made for row in rows)
    assert states["filtered"] == 2 * sum(drawn.metrics["dynamic/filtered"] for _, drawn in made) + 2 * sum(
        len(chunk.filtered.get("score", ())) // 2 for chunk in (*harness.buffer.ready(), *harness.buffer.under_way()))


def test_prompts_that_may_be_drawn_end_the_batches(summary):
    """Of 18 prompts four of the first twelve are filtered; the six that are left are no batch."""
    for most, whole in ((18, 1), (20, 2), (11, 0)):
        harness = DynamicHarness(config_of(steps=5), summary)
        harness.state.most_prompts = most

        async def run(harness=harness):
            made = 0
            while (lease := await harness.pipeline.next_batch()) is not None:
                harness.buffer.ack(lease, harness.state.step)
                harness.ledger.consumed(lease.keys, harness.state.step + 1)
                harness.state.step += 1
                harness.version = harness.state.published = harness.state.step
                made += 1
            return made

        assert run_in_virtual_time(run()) == whole and harness.pipeline.exhausted
        assert problems(harness)[0] == [] and sum(harness.state.cursor.position) <= most


@pytest.mark.parametrize(("bound", "steps", "kept"), [(16, 2, 16), (16, 5, None), (None, 2, None)])
def test_a_run_resumed_from_its_own_settings_keeps_the_bound_of_its_epochs(summary, bound, steps, kept):
    """They have steps in place of epochs; other steps are asked for on purpose."""
    former, resumed = (DynamicHarness(config_of(steps=steps), summary) for _ in range(2))
    former.state.most_prompts = bound
    resumed.state.load_state_dict(former.state.state_dict([]))
    resumed.pipeline.resume()
    assert resumed.state.most_prompts == kept
