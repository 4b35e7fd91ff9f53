"""Whole runs with random delays everywhere: what is trained on, how old it is, and that nothing is lost or hangs.

Workers are stand-ins that answer after delays with a heavy tail; time is virtual. Loop, pipeline, buffer and admission
are the real ones.
"""

import asyncio
import random
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.virtual_time import run_in_virtual_time
from rlhf_ray.algorithms.kl import FixedKL
from rlhf_ray.coordinator.loop import Coordinator
from rlhf_ray.coordinator.pipeline import Pipeline
from rlhf_ray.coordinator.state import RunState
from rlhf_ray.coordinator.step_profile import StepProfiler
from rlhf_ray.coordinator.stop import StopRequest
from rlhf_ray.coordinator.weight_sync import Published
from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.records import UpdateStats
from rlhf_ray.replay.buffer import ReplayBuffer
from tests.unit.coordinator.stand_ins import StandInGroup, StandInPrompts, role_groups_of

ROWS = 1000


class DelayedRun:
    """A run whose every call takes a random time. A rollout's tokens carry the versions of the weights that its
    generator held while they were made; generators take new weights one by one."""

    def __init__(self, config, summary, seed, slow=(), generating=1.0, updating=1.0):
        self.config, self._summary, self._random = config, summary, random.Random(seed)
        self.slow, self.generating, self.updating = dict(slow), generating, updating
        self.versions = [0, 0, 0]
        self.trained, self.events, self.made = [], [], Counter()
        self.generating_now = self.most_generating = 0
        self.started_in_update = []
        generators = StandInGroup("generators", self._generate, workers=len(self.versions))
        roles = role_groups_of(generators=generators, policy=self._learn, critic=self._learn, reward=self._tell,
                       reference=self._tell, assembler=self._assemble)
        self.state = RunState(FixedKL(0.1), PromptCursor(ROWS, 5, shuffle=False))
        eta = config.coordinator.max_staleness
        self.buffer = ReplayBuffer((eta + 1) * config.samples_per_step, None, eta, 1e9)
        said = ("admit", "lease", "generated", "scored", "consumed", "give_up")
        ledger = SimpleNamespace(**dict.fromkeys(said, _nothing), settled=_silence)
        self.pipeline = Pipeline(config, roles, self.state, self.buffer, StandInPrompts("prompts"), ledger)
        silent = SimpleNamespace(write=lambda *_: None, update=lambda *_, **__: None, warn=lambda _: None,
                                 save=self._delay, settled=_silence, close=_silence)
        self.coordinator = Coordinator(
            config, roles, self.state, self.buffer, self.pipeline,
            SimpleNamespace(publish=self._publish, changing=nullcontext),
            recovery=silent, evaluator=None, best=silent, metrics=silent, samples=silent, progress=silent,
            stop=StopRequest(lambda _: None), on_evaluation=lambda *_: None,
            profiler=StepProfiler(RunDirectory("nowhere"), roles))

    def go(self):
        """Make all steps; returns (keys, oldest version) of the chunks of each update."""
        run_in_virtual_time(self.coordinator.run())
        return self.trained

    async def _delay(self, scale=1.0):
        await asyncio.sleep(scale * self._random.paretovariate(1.2))

    async def _tell(self, rank, method, *_):
        await self._delay(0.3)

    async def _generate(self, rank, method, prompts, keys, seed, sampling):
        oldest = self.versions[rank]
        self.made[tuple(keys)] += 1
        self.started_in_update.append(self.events[-1:] == ["update"])
        self.generating_now += len(keys)
        self.most_generating = max(self.most_generating, self.generating_now)
        await self._delay(self.generating)
        await asyncio.sleep(self.slow.pop(keys[0].row, 0.0))  # slow once
        self.generating_now -= len(keys)
        return {"keys": tuple(keys), "oldest": oldest}

    async def _learn(self, rank, method, *arguments):
        self.events.append(method)
        if method != "update":
            await self._delay(0.1)
            return None
        step, chunks = arguments[0], [argument for argument in arguments if isinstance(argument, dict)]
        if len(arguments) - len(chunks) == 2:  # step and coefficient: the policy
            self.trained.append([(chunk["keys"], chunk["oldest"]) for chunk in chunks])
        await self._delay(self.updating)
        return UpdateStats(step=step, applied=1, skipped=0, seconds=0.1, tokens=1, metrics={"loss": 1.0})

    async def _assemble(self, rank, method, terms, keep_texts, ranks, *records):
        await self._delay(0.1)
        rollouts = records[: len(keep_texts)]
        return *rollouts, [self._summary(list(rollout["keys"]), rollout["oldest"]) for rollout in rollouts]

    async def _publish(self, version):
        self.events.append("publish")

        async def take(rank):
            await self._delay(0.3)
            self.versions[rank] = version

        await asyncio.gather(*(take(rank) for rank in range(len(self.versions))))
        self.events.append("published")
        return Published(0.1, 0.01, 2**20)


async def _silence(*_, **__):
    pass


def _nothing(*_):
    """A ledger that writes nothing; the real one has tests of its own."""


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), staleness=st.integers(0, 3), chunk=st.sampled_from([1, 2, 4]),
       pace=st.sampled_from([(0.2, 2.0), (1.0, 1.0), (3.0, 0.2)]), concurrency=st.sampled_from([None, 4, 9]))
def test_nothing_older_than_the_bound_is_trained_and_every_sample_made_and_trained_once(
        delayed_run, seed, staleness, chunk, pace, concurrency):
    run = delayed_run(seed, staleness, chunk, prompts=8, steps=8, concurrency=concurrency, generating=pace[0],
                      updating=pace[1])
    updates = run.go()
    for step, chunks in enumerate(updates):
        assert all(0 <= step - oldest <= staleness for _, oldest in chunks)
        assert sum(len(keys) for keys, _ in chunks) == 8
    trained = [key.row for chunks in updates for keys, _ in chunks for key in keys]
    assert sorted(trained) == list(range(8 * 8)), "each admitted sample once, none left behind"
    assert set(run.made.values()) == {1}, "what came too late would have been made again"
    if staleness == 0:
        assert trained == sorted(trained), "in the order of admission, whatever finished first"


@pytest.fixture(scope="module")
def delayed_run(ppo_config, summary):
    def build(seed, staleness, chunk, prompts, steps, concurrency=None, **delays):
        config = ppo_config(prompts=prompts, chunk=chunk, staleness=staleness, steps=steps)
        loop = config.coordinator.model_copy(update={"concurrency": concurrency})
        return DelayedRun(config.model_copy(update={"coordinator": loop}), summary, seed, **delays)

    return build


def test_a_bound_reached_is_a_bound_used(delayed_run):
    """With updates slower than generation the whole lead is used: the last updates train on samples η versions old."""
    for staleness in (1, 2, 3):
        updates = delayed_run(1, staleness, chunk=2, prompts=8, steps=9, generating=0.01, updating=50.0).go()
        oldest = [max(step - version for _, version in chunks) for step, chunks in enumerate(updates)]
        assert oldest[-3:] == [staleness] * 3 and max(oldest) == staleness


def test_a_batch_forms_without_a_slow_chunk_which_is_trained_in_a_later_one(delayed_run):
    slow = {2: 30.0}  # the chunk of rows 2 and 3, longer than an update and shorter than two
    updates = delayed_run(3, 1, chunk=2, prompts=4, steps=6, slow=slow, generating=0.1, updating=15.0).go()
    rows = [[keys[0].row for keys, _ in chunks] for chunks in updates]
    assert 2 not in rows[0] and len(rows[0]) == 2 and 2 in rows[1], rows
    assert sorted(row for step in rows for row in step) == list(range(0, 24, 2))


def test_what_could_not_be_trained_later_is_waited_for_and_never_made_twice(delayed_run):
    run = delayed_run(3, 1, chunk=2, prompts=4, steps=8, slow={2: 500.0}, generating=0.1, updating=5.0)
    rows = [[keys[0].row for keys, _ in chunks] for chunks in run.go()]
    assert 2 not in rows[0] and 2 in rows[1], "one version later is as late as it may be"
    assert set(run.made.values()) == {1}


def test_a_larger_bound_lets_a_slow_chunk_come_later(delayed_run):
    for staleness in (1, 2, 3):
        run = delayed_run(3, staleness, chunk=2, prompts=4, steps=8, slow={2: 500.0}, generating=0.1, updating=5.0)
        rows = [[keys[0].row for keys, _ in chunks] for chunks in run.go()]
        assert [step for step, chunks in enumerate(rows) if 2 in chunks] == [staleness], rows


def test_generators_get_no_more_than_they_take_and_the_next_as_soon_as_there_is_room(delayed_run):
    run = delayed_run(4, 2, chunk=2, prompts=8, steps=6, concurrency=6, generating=1.0, updating=1.0)
    run.go()
    assert run.most_generating == 6
    assert any(run.started_in_update), "an update does not keep the generators waiting"


def test_forward_passes_for_chunks_that_finish_during_an_update_come_after_the_publication(delayed_run):
    run = delayed_run(2, 1, chunk=2, prompts=8, steps=5, generating=0.1, updating=40.0)
    run.go()
    at_work = False
    for event in run.events:
        at_work = event in ("update", "publish") or (at_work and event != "published")
        assert not (at_work and event in ("logprobs", "values")), run.events
    assert run.events.count("logprobs") == run.events.count("values") == 20
