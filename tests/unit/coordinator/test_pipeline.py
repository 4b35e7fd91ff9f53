"""Chunks on their way: admission order, failures, what is made again. The engines are stand-ins; the buffer is real."""

import asyncio
from collections import Counter
from contextlib import closing

import pytest

from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.errors import RewardError, WorkerLost
from rlhf_ray.records import RewardTerms
from rlhf_ray.replay.audit import audit
from rlhf_ray.replay.ledger import open_for_reading
from tests.unit.coordinator.harnesses import ROWS, PipelineHarness, chunks_under_way
from tests.unit.coordinator.stand_ins import StandInGroup, role_groups_of


def in_loop(work):
    """Run a coroutine; leave nothing under way."""
    return asyncio.run(asyncio.wait_for(work, 20))


def cursor_keys(n):
    return PromptCursor(ROWS, 5, shuffle=True).next(n)


@pytest.mark.parametrize("seed", range(5))
def test_batches_hold_the_chunks_in_admission_order_whatever_finished_first(ppo_config, summary, seed):
    async def run():
        harness = PipelineHarness(ppo_config(prompts=8, chunk=2), summary, seed)
        keys = [key for _ in range(3) for key in await harness.train()]
        return [(k.epoch, k.row) for k in keys], harness

    keys, harness = in_loop(run())
    assert keys == cursor_keys(24)
    assert harness.buffer.under_way() == []


def test_chunks_add_up_to_whole_batches(ppo_config, summary):
    async def run():
        harness = PipelineHarness(ppo_config(prompts=7, chunk=3, steps=2), summary)
        await harness.train()
        await harness.train()
        return [len(keys) for keys, _ in harness.seeds]

    assert in_loop(run()) == [3, 3, 1, 3, 3, 1]


def test_a_prompts_samples_travel_together(ppo_config, summary):
    async def run():
        config = ppo_config(chunk=4)
        config = config.model_copy(update={"coordinator": config.coordinator.model_copy(
            update={"prompts_per_step": 3, "samples_per_prompt": 2})})
        return [(k.row, k.sample) for k in await PipelineHarness(config, summary).train()]

    rows = [row for _, row in cursor_keys(3)]
    assert in_loop(run()) == [(row, sample) for row in rows for sample in (0, 1)]


def test_a_chunk_whose_bytes_were_lost_is_made_again_with_the_same_keys_and_seed(ppo_config, summary):
    """Its rollout lay on a node that is gone when the assembler asked for it."""
    lost = []

    async def run():
        harness = PipelineHarness(ppo_config(prompts=4, chunk=2), summary)
        assemble = harness.assemble

        async def lose_one(rank, method, terms, rollouts, **columns):
            if not lost:
                lost.append(rollouts[0]["keys"])
                error = WorkerLost("an argument of assemble was lost")
                error.role, error.kind = "assembler", "result"
                raise error
            return await assemble(rank, method, terms, rollouts, **columns)

        harness.roles.assembler.answer = lose_one
        keys = await harness.train()
        return harness, [(k.epoch, k.row) for k in keys]

    harness, keys = in_loop(run())
    assert keys == cursor_keys(4)
    assert sorted(Counter(harness.seeds).values()) == [1, 2]
    assert Counter(harness.seeds)[tuple(lost[0]), harness.seeds[0][1]] == 2
    with closing(open_for_reading(harness.ledger.path)) as db:
        assert db.execute("SELECT state, reason FROM attempts").fetchall() == [
            ("generated", "an argument of assemble was lost")] * 2
        assert audit(db, ended=False) == []


def test_the_room_of_a_chunk_that_is_made_again_is_free_when_it_is_generated_again(ppo_config, summary):
    """Room for one chunk at a time. The first one is generated twice, the second time beside the second chunk."""
    async def run():
        config = ppo_config(prompts=4, chunk=2)
        loop = config.coordinator.model_copy(update={"concurrency": 2})
        harness, lost = PipelineHarness(config.model_copy(update={"coordinator": loop}), summary), []

        async def lose_one(*args, **columns):
            if not lost:
                lost.append(args)
                error = WorkerLost("an argument of assemble was lost")
                error.role, error.kind = "assembler", "result"
                raise error
            return await harness.assemble(*args, **columns)

        harness.roles.assembler.answer = lose_one
        await harness.train()
        harness.most_generating = 0
        keys = await harness.train()
        return [(key.epoch, key.row) for key in keys], harness.most_generating

    assert in_loop(run()) == (cursor_keys(8)[4:], 2)


@pytest.mark.parametrize(("ranks", "kind"), [(1, "result"), (2, "broke")])
def test_a_learner_rank_that_missed_a_pass_of_the_others_is_lost(ppo_config, summary, ranks, kind):
    """Its copy of a rollout lay on a node that is gone. A rank alone is asked again; of several, the others have made
    the pass, and their collectives would meet others of its own from then on."""
    async def run():
        harness = PipelineHarness(ppo_config(prompts=2, steps=1), summary, ranks=ranks)
        tell, lost = harness.policy.answer, []

        async def lose_one(rank, method, *rollouts):
            if rank == ranks - 1 and not lost:
                lost.append(rollouts)
                error = WorkerLost("an argument of logprobs was lost")
                error.role, error.rank, error.kind = "policy", rank, "result"
                raise error
            return await tell(rank, method, *rollouts)

        harness.policy.answer = lose_one
        await harness.train()

    if kind == "result":
        in_loop(run())
        return
    with pytest.raises(WorkerLost, match="an argument of logprobs") as told:
        in_loop(run())
    assert (told.value.role, told.value.kind) == ("policy", kind)


def test_the_assembler_gets_every_ranks_part_in_rank_order(ppo_config, summary):
    async def run():
        harness = PipelineHarness(ppo_config(prompts=2, steps=1), summary, ranks=2)
        await harness.train()
        return harness.parts

    assert in_loop(run()) == (RewardTerms(0.1), {
        "rewards": ("score_each", 0), "reference": ("logprobs", 0), "values": [("values", 0)],
        "old_logprobs": [("logprobs", 0), ("logprobs", 1)]})


def test_without_a_critic_the_assembler_gets_the_policys_parts_alone(ppo_config, summary):
    async def run():
        config = ppo_config(prompts=2, steps=1)
        harness = PipelineHarness(config, summary, ranks=2)
        roles = role_groups_of(generators=harness.generators, policy=harness.policy, reward=harness.score,
                                    reference=harness.forward,
                       critic=None, assembler=harness.assemble)
        harness.pipeline = harness.pipeline_of(config, roles)
        await harness.train()
        return harness.parts

    assert in_loop(run()) == (RewardTerms(0.1), {
        "rewards": ("score_each", 0), "reference": ("logprobs", 0), "values": [],
        "old_logprobs": [("logprobs", 0), ("logprobs", 1)]})


def test_a_policy_that_is_its_own_critic_gives_both_in_one_call(ppo_config, summary):
    async def run():
        harness = PipelineHarness(ppo_config(prompts=2, steps=1, critic={"backbone": "policy"}), summary, ranks=2)

        async def tell_twice(rank, method, rollout):
            assert method == "logprobs_and_values"
            return ("logprobs", rank), ("values", rank)

        policy = StandInGroup("policy", tell_twice, workers=2)
        roles = role_groups_of(generators=harness.generators, policy=policy, reward=harness.score,
                                    reference=harness.forward,
                       critic=None, assembler=harness.assemble)
        harness.pipeline = harness.pipeline_of(harness.pipeline.config, roles)
        await harness.train()
        return harness.parts, policy.log

    told, log = in_loop(run())
    assert told == (RewardTerms(0.1), {
        "rewards": ("score_each", 0), "reference": ("logprobs", 0), "values": [("values", 0), ("values", 1)],
        "old_logprobs": [("logprobs", 0), ("logprobs", 1)]})
    assert log == [("logprobs_and_values", 0), ("logprobs_and_values", 1)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_a_reference_the_policy_s_frozen_base_is_asked_rank_by_rank(ppo_config, summary, ranks):
    async def run():
        config = ppo_config(prompts=2, steps=1, policy={"lora": {}})
        harness = PipelineHarness(config, summary, ranks=ranks)

        async def assemble(rank, method, *args, **columns):
            return args if method == "join" else await harness.assemble(rank, method, *args, **columns)

        roles = role_groups_of(generators=harness.generators, policy=harness.policy, reward=harness.score,
                                reference=None,
                       critic=None, assembler=assemble)
        harness.pipeline = harness.pipeline_of(harness.pipeline.config, roles)
        await harness.train()
        return harness.parts[1]["reference"]

    shares = tuple(("reference_logprobs", rank) for rank in range(ranks))
    assert in_loop(run()) == (shares[0] if ranks == 1 else shares)


def test_synchronous_generation_stays_within_the_step(ppo_config, summary):
    async def run():
        harness = PipelineHarness(ppo_config(prompts=8, chunk=2, staleness=0), summary)
        await harness.train()
        return len(harness.seeds), harness.buffer.running

    assert in_loop(run()) == (4, 0)


def test_with_staleness_one_the_next_batch_is_under_way_before_this_one_is_asked_for(ppo_config, summary):
    async def run():
        harness = PipelineHarness(ppo_config(prompts=8, chunk=2, staleness=1), summary)
        await harness.pipeline.next_batch()
        started = len(harness.generators.log)
        await harness.pipeline.close()
        return started

    assert in_loop(run()) == 8


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_no_more_is_admitted_than_the_run_trains_on(ppo_config, summary, staleness):
    async def run():
        harness = PipelineHarness(ppo_config(prompts=4, chunk=2, staleness=staleness, steps=3), summary)
        keys = [k for _ in range(3) for k in await harness.train()]
        generated = [k for chunk, _ in harness.seeds for k in chunk]
        return sorted(keys), sorted(set(generated)), harness

    keys, generated, harness = in_loop(run())
    assert keys == generated
    assert harness.buffer.running == 0 and harness.buffer.under_way() == []


def test_every_chunk_is_generated_with_the_runs_seed(ppo_config, summary):
    async def run():
        harness = PipelineHarness(ppo_config(), summary)
        await harness.train()
        return {seed for _, seed in harness.seeds}

    assert in_loop(run()) == {5}


def test_a_chunk_that_came_out_too_old_is_made_again_with_the_same_keys(ppo_config, summary):
    async def run():
        harness = PipelineHarness(ppo_config(prompts=2, chunk=2, staleness=0, steps=9), summary, version=0)
        harness.state.step = 3  # generators are three versions behind
        harness.buffer.evict(3)
        waiting = asyncio.ensure_future(harness.pipeline.next_batch())
        while len(harness.seeds) < 2:
            await asyncio.sleep(0.001)
        harness.version = 3
        lease = await waiting
        return lease, harness

    lease, harness = in_loop(run())
    assert len(harness.seeds) >= 2 and len({keys for keys, _ in harness.seeds}) == 1
    assert tuple(lease.keys) == harness.seeds[0][0]
    assert harness.buffer.under_way() == []


def test_an_evicted_chunk_is_made_again_with_the_same_keys(ppo_config, summary):
    async def run():
        harness = PipelineHarness(ppo_config(prompts=2, chunk=2, staleness=1, steps=9), summary)
        harness.pipeline.admit()
        await asyncio.gather(*chunks_under_way())
        ready = harness.buffer.ready()
        assert [chunk.place.order for chunk in ready] == [0, 1]
        harness.version = harness.state.step = 5
        evicted = harness.buffer.evict(5)
        harness.pipeline.return_evicted(evicted)
        assert evicted == ready
        assert harness.state.returned == [key for chunk in ready for key in chunk.keys]
        lease = await harness.pipeline.next_batch()
        await harness.pipeline.close()
        return ready, lease

    ready, lease = in_loop(run())
    assert lease.keys in ([*ready[0].keys], [*ready[1].keys])
    assert lease.chunks[0].min_version == 5


def test_the_first_failing_chunk_is_raised(ppo_config, summary):
    async def run():
        harness = PipelineHarness(ppo_config(), summary)

        async def refuse(rank, method, rollouts, prompts):
            raise RewardError(f"no score for row {rollouts[0]['keys'][0].row}")

        harness.roles = role_groups_of(generators=harness.generators, policy=harness.policy, reward=refuse,
                                          reference=harness.forward,
                             critic=harness.forward, assembler=harness.assemble)
        harness.pipeline = harness.pipeline_of(ppo_config(), harness.roles)
        try:
            await harness.pipeline.next_batch()
        finally:
            await harness.pipeline.close()

    with pytest.raises(RewardError, match="no score for row"):
        in_loop(run())


def test_what_was_under_way_starts_again_in_its_old_place(ppo_config, summary):
    async def run():
        config = ppo_config(prompts=6, chunk=2)
        harness = PipelineHarness(config, summary)
        harness.pipeline.admit()
        saved, buffer = harness.state.state_dict(harness.buffer.under_way()), harness.buffer.state_dict()
        await harness.pipeline.close()

        resumed = PipelineHarness(config, summary, seed=3)
        resumed.state.load_state_dict(saved, resumed.buffer.load_state_dict(buffer, {}))
        for chunk in resumed.buffer.under_way():
            resumed.ledger.admit(chunk.keys, resumed.state.cursor.position)
        resumed.pipeline.resume()
        keys = await resumed.train()
        return [(k.epoch, k.row) for k in keys], [(k.epoch, k.row) for k in await resumed.train()]

    first, second = in_loop(run())
    assert first + second == cursor_keys(12)


def test_closing_drops_what_is_under_way(ppo_config, summary):
    async def run():
        harness = PipelineHarness(ppo_config(), summary)
        harness.pipeline.admit()
        tasks = chunks_under_way()
        await harness.pipeline.close()
        return tasks, chunks_under_way()

    tasks, left = in_loop(run())
    assert len(tasks) == 4 and all(task.cancelled() for task in tasks) and left == []


def test_generators_share_the_chunks(ppo_config, summary):
    async def run():
        harness = PipelineHarness(ppo_config(prompts=6, chunk=2, steps=1), summary)
        await harness.train()
        return harness.generators.log

    assert in_loop(run()) == [("generate", 0), ("generate", 1), ("generate", 2)]


@pytest.mark.parametrize("staleness", [0, 1])
def test_chunks_are_scored_in_batches_only_where_timing_may_choose_it(ppo_config, summary, staleness, monkeypatch):
    monkeypatch.setattr("rlhf_ray.coordinator.pipeline.LINGER", 100.0)  # all that are under way

    async def run():
        harness = PipelineHarness(ppo_config(prompts=4, chunk=2, staleness=staleness, steps=2), summary)
        keys = [key for _ in range(2) for key in await harness.train()]
        return sorted((k.epoch, k.row) for k in keys), harness.batches

    keys, batches = in_loop(run())
    assert keys == sorted(cursor_keys(8))
    sizes = {method: {len(batch) for batch in found} for method, found in batches.items()}
    assert sizes.keys() == {"score_each", "logprobs", "values"}
    if staleness == 0:
        assert set.union(*sizes.values()) == {1}
    else:
        assert all(max(found) > 1 for found in sizes.values()), sizes
        assert batches["score_each"] == batches["values"], "they go all the way together"


def test_the_prompts_of_several_chunks_come_in_one_call(ppo_config, summary):
    async def run():
        harness = PipelineHarness(ppo_config(prompts=48, chunk=2, steps=1), summary)
        await harness.train()
        return harness.prompts.reads

    reads = in_loop(run())
    assert [len(rows) for rows in reads] == [16, 16, 16]
    assert [row for rows in reads for row in rows] == [row for _, row in cursor_keys(48)]
