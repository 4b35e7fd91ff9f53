"""The coordinator and its pipeline over stand-ins: what a test of them starts from."""

import asyncio
import random
import tempfile
from collections import Counter, defaultdict
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from benchmarks.virtual_time import run_in_virtual_time
from rlhf_ray.algorithms.kl import FixedKL
from rlhf_ray.config.derived import derive
from rlhf_ray.coordinator.loop import Coordinator
from rlhf_ray.coordinator.pipeline import Pipeline
from rlhf_ray.coordinator.quarantine import Quarantine
from rlhf_ray.coordinator.run_state import RunState
from rlhf_ray.coordinator.sample_saving import SampleSaving
from rlhf_ray.coordinator.step_profile import StepProfiler
from rlhf_ray.coordinator.stop import StopRequest
from rlhf_ray.coordinator.weight_sync import Published
from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.errors import TrainingError, UnscoredSamples
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.records import Unscored, UpdateStats
from rlhf_ray.replay.buffer import ReplayBuffer
from tests.unit.coordinator.stand_ins import StandInGroup, StandInPrompts, calls_of, ledger_of, role_groups_of

ROWS = 50
FIRST = [row for _, row in PromptCursor(ROWS, 5, shuffle=True).next(ROWS)]
"""Rows in the order in which they are drawn."""


class PipelineHarness:
    """A pipeline over stand-ins. `version` is the one that generators hold; delays are random, of a few ms at most.
    `generating` counts the samples that generators work on."""

    def __init__(self, config, summary, seed=0, version=0, ranks=1):
        self.version, self.seeds, self._random, self._summary = version, [], random.Random(seed), summary
        self.batches = defaultdict(list)
        self.generating = self.most_generating = 0
        self.generators = StandInGroup("generators", self.generate, workers=3)
        self.policy = StandInGroup("policy", self.forward, workers=ranks)
        self.roles = role_groups_of(generators=self.generators, policy=self.policy, reward=self.score,
                            reference=self.forward, critic=self.forward, assembler=self.assemble)
        self.state = RunState(FixedKL(0.1), PromptCursor(ROWS, 5, shuffle=True))
        capacity = (config.coordinator.max_staleness + 1) * config.coordinator.samples_per_step
        self.buffer = ReplayBuffer(capacity, None, config.coordinator.max_staleness)
        self._directory = tempfile.TemporaryDirectory()
        self.ledger = ledger_of(config, self.state.cursor, self._directory.name)
        self.pipeline = self.pipeline_of(config, self.roles)

    def pipeline_of(self, config, roles):
        self.prompts = StandInPrompts("prompts")
        self.calls = calls_of(config, roles)
        return Pipeline(config, roles, self.calls, self.state, self.buffer, self.prompts, self.ledger)

    async def delay(self):
        await asyncio.sleep(self._random.random() * 0.005)

    async def generate(self, rank, method, prompts, keys, seed, sampling):
        assert (method, sampling) == ("generate", None)
        assert prompts[0] == "prompts" and prompts[1] >= {key.row for key in keys}
        self.seeds.append((tuple(keys), seed))
        rollout = {"keys": keys, "version": self.version}
        self.generating += len(keys)
        self.most_generating = max(self.most_generating, self.generating)
        try:
            await self.delay()
        finally:
            self.generating -= len(keys)
        return rollout

    async def forward(self, rank, method, *passed, rollouts=()):
        rollouts = passed or rollouts  # learners get them one by one, frozen scorers as a list
        self.batches[method].append([rollout["keys"] for rollout in rollouts])
        await self.delay()
        return method, rank

    async def score(self, rank, method, rollouts, prompts):
        for rollout, (name, rows) in zip(rollouts, prompts, strict=True):
            assert name == "prompts" and rows >= {key.row for key in rollout["keys"]}
        return await self.forward(rank, method, *rollouts)

    async def assemble(self, rank, method, terms, rollouts, **columns):
        await self.delay()
        self.parts = terms, columns
        experience = [f"experience {rollout['keys'][0].row}" for rollout in rollouts]
        return *experience, [self._summary(rollout["keys"], rollout["version"]) for rollout in rollouts]

    async def train(self):
        """Take a batch and pretend to learn from it; returns its keys."""
        lease = await asyncio.wait_for(self.pipeline.next_batch(), 10)
        self.buffer.ack(lease, self.state.step)
        self.ledger.consumed(lease.keys, self.state.step + 1)
        self.state.step += 1
        self.version = self.state.published = self.state.step
        self.pipeline.return_evicted(self.buffer.evict(self.state.step))
        return lease.keys


def saved(harness, copy):
    """What a checkpoint of now has of the coordinator; its ledger is at `copy`."""
    harness.ledger.save(copy)
    summaries = {chunk.place.plain(): chunk.summary for chunk in harness.buffer.ready()}
    return harness.state.state_dict(harness.buffer.under_way()), harness.buffer.state_dict(), summaries


class QuarantineHarness(PipelineHarness):
    """A pipeline whose reward has no score for sample 0 of some rows."""

    def __init__(self, config, summary, bad, limit=0.1, **more):
        self.bad = set(bad)
        super().__init__(config, summary, **more)

        def warn(text):
            self.warnings.append(text)

        self.warnings = []
        self.file = self.ledger.path.with_name("quarantine.jsonl")
        self.pipeline.quarantine = Quarantine(self.ledger, self.file, limit, ROWS, warn)

    async def assemble(self, rank, method, *arguments, **columns):
        if method != "select_samples":
            return await super().assemble(rank, method, *arguments, **columns)
        rollout, numbers = arguments
        return {**rollout, "keys": [rollout["keys"][number] for number in numbers]}

    async def score(self, rank, method, rollouts, prompts):
        keys = [key for rollout in rollouts for key in rollout["keys"]]
        worst = [key for key in keys if key.row in self.bad and not key.sample]
        if blamed := [Unscored(key, f"p{key.row}", "r", f"bad {key.row}") for key in worst]:
            await self.delay()
            raise UnscoredSamples("no score", blamed)
        return await super().score(rank, method, rollouts, prompts)


def coordinator_of(config, roles, state, buffer, calls, pipeline, publish, **parts):
    """A coordinator without parts of its own but those that are given: the others do nothing."""
    nothing = SimpleNamespace(write=_nothing, update=_nothing, note=_nothing, warn=_nothing, save=_silence,
                              settled=_silence, close=_silence, writing=None)
    others = dict.fromkeys(("recovery", "best", "metrics", "progress"), nothing)
    others["sample_saving"] = SampleSaving("off", roles, None, Path(), None, True, _nothing)
    given = {"evaluator": None, "stop": StopRequest(_nothing), "on_evaluation": _nothing, **others, **parts}
    return Coordinator(
        config=config, derived=derive(config), roles=roles, state=state, buffer=buffer, calls=calls, pipeline=pipeline,
        weights=SimpleNamespace(publish=publish, changing=nullcontext, phases=None, canary=None, require_idle=_silence),
        profiler=StepProfiler(RunDirectory("nowhere"), roles), **given)


def chunks_under_way():
    """The pipeline's tasks in the running loop that are not over."""
    return [task for task in asyncio.all_tasks() if task.get_name().startswith("chunk ")]


class CoordinatorHarness:
    """A coordinator that records what it does in `events`; `left` has the chunks under way when the run was over."""

    def __init__(self, config, summary, stop_after=None, fail_at=None, critic=True, best_at=(),
                 stop_in_evaluation=None, skipped=()):
        self.events, self.rows, self.warnings, self.update_arguments, self.patience = [], {}, [], [], []
        self.notes = []
        self.stop_after, self.fail_at, self.best_at = stop_after, fail_at, best_at
        self.stop_in_evaluation, self.skipped = stop_in_evaluation, skipped
        harness = self.harness = PipelineHarness(config, summary)
        learners = {role: StandInGroup(role, self.learner(role), workers=2) for role in ("policy", "critic")}
        if not critic:
            learners["critic"] = None
        harness.roles = role_groups_of(generators=harness.generators, reward=harness.score, reference=harness.forward,
                             assembler=harness.assemble, **learners)
        harness.pipeline = harness.pipeline_of(config, harness.roles)
        self.stop = StopRequest(lambda _: None)
        progress = SimpleNamespace(update=_nothing, note=self.notes.append, warn=self.warnings.append)
        self.coordinator = coordinator_of(
            config, harness.roles, harness.state, harness.buffer, harness.calls, harness.pipeline, self.publish,
            best=SimpleNamespace(consider=self._consider, keep=self._keep),
            recovery=SimpleNamespace(save=self.save, settled=_silence, close=self._close, writing=None),
            evaluator=SimpleNamespace(rows=1, measure=self._measure), metrics=SimpleNamespace(write=self._write),
            progress=progress, stop=self.stop,
            on_evaluation=lambda step, _: self.events.append(f"evaluate {step}"))

    def learner(self, role):
        async def behave(rank, method, *args):
            if method not in ("update", "update_both"):
                return (method, rank)
            if args[0] == self.fail_at:
                raise TrainingError("not finite")
            if rank == 0:
                self.events.append(f"{role} {args[0]}")
                self.update_arguments.append((role, *args))
            skipped = (role, args[0]) in self.skipped
            stats = UpdateStats(step=args[0], applied=int(not skipped), skipped=int(skipped), seconds=0.1, tokens=1,
                                metrics={"loss": 1.0})
            return stats if method == "update" else [stats, replace(stats, metrics={"loss": 2.0})]

        return behave

    async def publish(self, version):
        self.events.append(f"publish {version}")
        self.harness.version = version
        if version == self.stop_after:
            self.stop.ask("SIGTERM")
        return Published(0.1, 0.01, 2**20)

    async def save(self):
        self.events.append(f"save {self.harness.state.step}")

    async def _close(self, patience_s=None):
        self.patience.append(patience_s)

    async def _measure(self):
        if self.harness.state.step == self.stop_in_evaluation:
            self.stop.ask("SIGTERM")
            await asyncio.sleep(60)
        return SimpleNamespace(metrics="numbers")

    def _consider(self, step, metrics):
        assert metrics == "numbers"
        return step in self.best_at

    async def _keep(self):
        self.events.append(f"keep {self.harness.state.step}")

    def _write(self, step, row):
        self.rows[step] = row

    def go(self):
        async def run():
            try:
                await asyncio.wait_for(self.coordinator.run(), 20)
            finally:
                self.left = chunks_under_way()

        asyncio.run(run())
        return self.events


class DelayedRun:
    """A run whose every call takes a random time. A rollout's tokens carry the versions of the weights that its
    generator held while they were made; generators take new weights one by one."""

    def __init__(self, config, summary, seed, slow=(), generating=1.0, updating=1.0, capacity=None):
        """`capacity` of the buffer in samples; by default as many as can be fresh."""
        self.config, self._summary, self._random = config, summary, random.Random(seed)
        self.slow, self.generating, self.updating = dict(slow), generating, updating
        self.versions = [0, 0, 0]
        self.trained, self.events, self.made = [], [], Counter()
        self.generating_now = self.most_generating = 0
        self.started_in_update = []
        generators = StandInGroup("generators", self.generate, workers=len(self.versions))
        roles = role_groups_of(generators=generators, policy=self.learn, critic=self.learn, reward=self.forward,
                       reference=self.forward, assembler=self.assemble)
        self.state = RunState(FixedKL(0.1), PromptCursor(1000, 5, shuffle=False))
        eta = config.coordinator.max_staleness
        self.buffer = ReplayBuffer(capacity or (eta + 1) * config.coordinator.samples_per_step, None, eta)
        calls = calls_of(config, roles)
        self.pipeline = Pipeline(config, roles, calls, self.state, self.buffer, StandInPrompts("prompts"),
                                 self.ledger_of(config))
        self.coordinator = coordinator_of(
            config, roles, self.state, self.buffer, calls, self.pipeline, self.publish,
            recovery=SimpleNamespace(save=self.delay, settled=_silence, close=_silence))

    def ledger_of(self, config):
        """The run's ledger: by default one that keeps nothing."""
        writes = ("admit", "start_attempt", "generated", "scored", "consumed", "give_up")
        return SimpleNamespace(**dict.fromkeys(writes, _nothing), settled=_silence)

    def go(self):
        """Make all steps; returns (keys, oldest version) of the chunks of each update."""
        run_in_virtual_time(self.coordinator.run())
        return self.trained

    async def delay(self, scale=1.0):
        await asyncio.sleep(scale * self._random.paretovariate(1.2))

    async def forward(self, rank, method, *_, **__):
        await self.delay(0.3)

    async def generate(self, rank, method, prompts, keys, seed, sampling):
        oldest = self.versions[rank]
        self.made[tuple(keys)] += 1
        self.started_in_update.append(self.events[-1:] == ["update"])
        self.generating_now += len(keys)
        self.most_generating = max(self.most_generating, self.generating_now)
        await self.delay(self.generating)
        await asyncio.sleep(self.slow.pop(keys[0].row, 0.0))  # slow once
        self.generating_now -= len(keys)
        return {"keys": tuple(keys), "oldest": oldest}

    async def learn(self, rank, method, *arguments):
        self.events.append(method)
        if method != "update":
            await self.delay(0.1)
            return None
        step, chunks = arguments[0], [argument for argument in arguments if isinstance(argument, dict)]
        if len(arguments) - len(chunks) == 2:  # step and coefficient: the policy
            self.trained.append([(chunk["keys"], chunk["oldest"]) for chunk in chunks])
        await self.delay(self.updating)
        return UpdateStats(step=step, applied=1, skipped=0, seconds=0.1, tokens=1, metrics={"loss": 1.0})

    async def assemble(self, rank, method, terms, rollouts, **columns):
        await self.delay(0.1)
        return *rollouts, [self._summary(list(rollout["keys"]), rollout["oldest"]) for rollout in rollouts]

    async def publish(self, version):
        self.events.append("publish")

        async def take(rank):
            await self.delay(0.3)
            self.versions[rank] = version

        await asyncio.gather(*(take(rank) for rank in range(len(self.versions))))
        self.events.append("published")
        return Published(0.1, 0.01, 2**20)


async def _silence(*_, **__):
    pass


def _nothing(*_, **__):
    pass
