"""Runs whose episode runners do whatever was drawn: they answer late or never, raise errors, die, cannot be replaced.

Loop, pipeline, buffer, ledger, quarantine, admission, dispatch and replacement are the product's; workers are
stand-ins, and time is virtual.
"""

import asyncio
import random
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain, cycle
from types import SimpleNamespace

import numpy as np

from benchmarks.virtual_time import run_in_virtual_time
from rlhf_ray.algorithms.kl import FixedKL
from rlhf_ray.config.derived import episodes_deadline_s
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.loop import check_open_samples
from rlhf_ray.coordinator.pipeline import Pipeline
from rlhf_ray.coordinator.quarantine import Quarantine
from rlhf_ray.coordinator.run_state import RunState
from rlhf_ray.coordinator.scoring_batcher import LINGER
from rlhf_ray.coordinator.stop import StopRequest
from rlhf_ray.coordinator.weight_sync import Published
from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.errors import DataError, RLHFError, WorkerError, WorkerLost
from rlhf_ray.observability.spans import StepClock
from rlhf_ray.records import Episode, Sifted, UpdateStats
from rlhf_ray.replay.audit import audit
from rlhf_ray.replay.buffer import ReplayBuffer
from rlhf_ray.replay.ledger import Ledger, open_for_reading
from rlhf_ray.replay.ledger_tables import LedgerFacts
from rlhf_ray.roles.episode_numbers import episode_numbers
from rlhf_ray.roles.episode_runner import EpisodeRunner
from rlhf_ray.roles.reward_scorer import require_outcomes
from rlhf_ray.stages.ppo import finalize_ledger
from rlhf_ray.workers.calls import GRACE_S, Deadline, Fence, Startable
from rlhf_ray.workers.health_monitor import LONGEST_DELAY_S, HealthMonitor, as_started
from rlhf_ray.workers.role_groups import RoleGroups
from tests.unit.coordinator.harnesses import chunks_under_way, coordinator_of
from tests.unit.coordinator.stand_ins import FOREVER_S, StandInGroup, StandInPrompts, calls_of, role_groups_of

OTHER_S = 1.0
"""Longest call of any other worker, and longest time to end a process."""
OTHERS = 8
"""Calls of others, one after the other, from the end of a runner's call to the commit of its chunk."""
UPDATE_S = 100.0
START_S, CALL_S = 40.0, 30.0
"""`cluster.start_timeout_s` and `cluster.call_timeout_s`."""
DELAYS = 6
"""Delayed restarts until the delay is the longest: 15, 30, 60, 120, 240 and 480 s."""


@dataclass(frozen=True)
class Played:
    """A runner's call: what comes of it, after `part` of its deadline."""

    uses: tuple[str, ...] = ("train",)
    """Use of each sample, in turn."""
    how: str = "answers"
    """Or "hangs", "dies", "breaks" (an error that is not ours), "raises" (one that is); "loses" answers, and the node
    with the answer is lost."""
    part: float = 0.0
    equal: bool = False
    """Whether all samples have the same score."""


@dataclass(frozen=True)
class Repair:
    """A restart of a runner: "starts" after `part` of its deadline, or "dies", "hangs" or "fails" instead."""

    how: str = "starts"
    part: float = 0.0


@dataclass(frozen=True)
class Rollout:
    """What the driver has a reference to."""

    keys: list
    version: int
    episodes: list[Episode]
    equal: bool
    lost: bool


class Runners(StandInGroup):
    """Runners that do as the calls and repairs say, in the order in which the driver makes them; then, they do well."""

    def __init__(self, workers, calls, repairs, clock, again=False):
        """`again`: they begin again after the last one."""
        super().__init__("episode_runner", self.behave, workers)
        end = [] if again else [Played()]
        self._calls = chain(calls, cycle(end or calls))
        self._repairs = chain(repairs, cycle([Repair()] if not (again and repairs) else repairs))
        self._clock = clock
        self.fences = [Fence() for _ in range(workers)]
        self.made = 0
        """Calls of `play` so far."""
        self.open = 0
        self.losses = 0
        """Processes given up so far."""
        self.most = 0
        """Calls until the end of the step."""
        self.version = 0

    def call(self, rank, method, *args, **named):
        return replace(super().call(rank, method, *args, **named), fence=self.fences[rank])

    def incarnation(self, rank):
        return self.fences[rank].incarnation

    def give_up(self, rank, reason):
        self.losses += self.fences[rank].closed is None
        self.fences[rank].close(reason)

    async def respawn(self, rank, reason):
        self.give_up(rank, reason)
        await asyncio.sleep(OTHER_S)
        self.fences[rank] = Fence(self.fences[rank].incarnation + 1)

    async def start_replica(self, rank, timeout_s):
        await self.call(rank, Startable.start, deadline=Deadline(timeout_s)).value()

    def lost(self, rank, method):
        return WorkerLost(f"episode_runner/{rank} died in {method}", self.role, rank, self.incarnation(rank), method)

    async def behave(self, rank, method, *args, **named):
        if method == "start":
            return await self.start(rank)
        assert method == "play"
        self.made += 1
        assert self.made <= self.most, f"{self.made} calls of runners, and the step is not done"
        self.open += 1
        try:
            return await self.play(rank, *args, **named)
        finally:
            self.open -= 1

    async def start(self, rank):
        repair = next(self._repairs)
        await asyncio.sleep(FOREVER_S if repair.how == "hangs" else repair.part * START_S)
        if repair.how == "dies":
            raise self.lost(rank, "start")
        if repair.how == "fails":
            raise DataError("the environment cannot be loaded any more")

    async def play(self, rank, prompts, keys, seed, *rest, **named):
        call = next(self._calls)
        version = self.version
        await asyncio.sleep(FOREVER_S if call.how == "hangs" else call.part * self.deadline_s)
        if call.how == "dies":
            raise self.lost(rank, "play")
        if call.how == "breaks":
            raise WorkerError(f"episode_runner/{rank} failed in play: KeyError: 3", self.role)
        if call.how == "raises":
            raise DataError("row 3: column 'environment' is 7")
        episodes = [episode_of(call.uses[number % len(call.uses)]) for number in range(len(keys))]
        return Rollout(keys, version, self.judge._without_lonely(keys, episodes), call.equal, call.how == "loses")


def episode_of(use):
    cause = "completed" if use == "train" else "error_timeout"
    return Episode("tools", cause, use, error="" if use == "train" else "the tool hangs")


@dataclass
class Saved:
    """A checkpoint of the coordinator."""

    state: dict
    buffer: dict
    summaries: dict
    copy: object
    step: int


@dataclass
class Ended:
    """How a run ended."""

    error: RLHFError | None
    step: int
    saved: Saved | None
    """The newest checkpoint."""
    exhausted: bool
    left: list = field(default_factory=list)
    """Chunks that were still being made."""


class EpisodeRun:
    """One attempt at a run of the driver.

    It checks what every step must be: a whole batch of keys that were not trained before, in a bounded time, with a
    sound ledger.
    """

    def __init__(self, config: PPOConfig, summary, directory, calls=(), repairs=(), again=False, workers=2, seed=0,
                 stop_at=None, rows=10, bounded=False, saved=None):
        """
        Args:
            stop_at: when a stop is requested, in seconds; None for never.
            bounded: no more prompts may be drawn than the steps need without a loss.
            saved: where the run goes on from.
        """
        self.config, self.summary, self.directory, self.stop_at = config, summary, directory, stop_at
        self.calls, self.repairs, self.again, self.workers, self.rows = list(calls), list(repairs), again, workers, rows
        self.bounded, self.saved, self._random = bounded, saved, random.Random(seed)
        self.trained = set()
        self.saves = 0

    def go(self) -> Ended:
        """Run to the end.

        Raises:
            RuntimeError: the driver waits, and nothing will ever happen.
        """
        return run_in_virtual_time(self._run())

    async def _run(self):
        self.build()
        loop = asyncio.get_running_loop()
        if self.stop_at is not None:
            loop.call_later(self.stop_at, self.stop.ask, "SIGTERM")
        error = None
        async with self.roles.health.at_work():
            if self.saved is not None:
                self.pipeline.resume()
            try:
                await self.coordinator.run()
            except RLHFError as ended:
                error = ended
        if error is None:
            finalize_ledger(self.ledger, self.coordinator.open_keys())
        else:
            self.check_ledger()
        return Ended(error, self.state.step, self.saved, self.pipeline.exhausted, chunks_under_way())

    def build(self):
        """All parts; called in the loop whose time they keep."""
        config, clock = self.config, asyncio.get_running_loop().time
        health = HealthMonitor(config.cluster, clock=StepClock(clock))
        self.runners = Runners(self.workers, self.calls, self.repairs, clock, self.again)
        self.runners.deadline_s = episodes_deadline_s(config)
        self.runners.judge = EpisodeRunner({}, ModelConfig(path="m"), SamplingConfig(), None,
                                           least_scored=2 if config.algorithm.compares_groups else 0)
        groups = role_groups_of(health, reward=self.score, reference=self.forward, critic=None,
                                policy=StandInGroup("policy", self.learn), assembler=self.assemble)
        self.roles = RoleGroups({"episode_runner": self.runners, **groups.by_section}, health=health)
        self.roles.keep_alive(as_started)
        self.state = RunState(FixedKL(0.1), PromptCursor(self.rows, 5, shuffle=True))
        if self.bounded:
            self.state.most_prompts = config.run.steps * config.coordinator.prompts_per_step
        self.buffer = ReplayBuffer(config.coordinator.samples_ahead, None, config.coordinator.max_staleness)
        facts = LedgerFacts.of(config.coordinator, self.state.cursor, config.algorithm.dynamic_sampling is not None)
        path = self.directory / "ledger.sqlite"
        if self.saved is None:
            self.ledger = Ledger.create(path, facts)
        else:
            self.ledger = Ledger.resume(path, self.saved.copy, facts)
        self.said = []
        quarantine = Quarantine(self.ledger, self.directory / "quarantine.jsonl", config.reward.quarantine_limit,
                                self.rows, self.said.append)
        calls = calls_of(config, self.roles)
        self.pipeline = Pipeline(config, self.roles, calls, self.state, self.buffer, StandInPrompts("prompts"),
                                 self.ledger, quarantine)
        self._next_batch = self.pipeline.next_batch
        self.pipeline.next_batch = self.next_batch
        self.stop = StopRequest(self.said.append)
        self.coordinator = coordinator_of(
            config, self.roles, self.state, self.buffer, calls, self.pipeline, self.publish, stop=self.stop,
            recovery=SimpleNamespace(save=self.save, settled=_silence, close=_silence, writing=None))
        if self.saved is not None:
            refs = dict.fromkeys(self.saved.summaries, "experience")
            under_way = self.buffer.load_state_dict(self.saved.buffer, refs, self.saved.summaries)
            self.state.load_state_dict(self.saved.state, under_way)
            self.coordinator.saved_at = self.runners.version = self.state.step

    # What is checked

    async def next_batch(self):
        """As the pipeline's, within its bounds."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        before = self.runners.made - self.runners.open
        losses = self.runners.losses - 1  # one may be under repair
        self.runners.most = before + self.most_calls
        self.check_ledger()
        task = asyncio.ensure_future(self._next_batch())
        try:
            while not task.done():
                calls = self.runners.made - before
                end = began + self.longest_s(calls, self.runners.losses - losses)
                assert loop.time() < end, f"a step has waited for {loop.time() - began:.0f} s, with {calls} calls"
                await asyncio.wait([task], timeout=end - loop.time())
            lease = task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if lease is None:
            assert self.pipeline.exhausted, "no batch, and prompts are left"
            return None
        size = self.config.coordinator.samples_per_step
        assert len(lease.keys) == lease.samples == size, f"a batch of {len(lease.keys)}"
        assert len(self.trained | set(lease.keys)) == len(self.trained) + size, "a key was trained before"
        self.trained |= set(lease.keys)
        return lease

    def longest_s(self, calls, losses):
        """A call of a runner lasts until its deadline, and then its chunk is scored. After a loss, if no other runner
        is up, one of them is up again after so many restarts as are made at once, and a delayed one; or the run
        ends."""
        cluster = self.config.cluster
        call_s = (episodes_deadline_s(self.config) + GRACE_S) * (1 + LINGER) + OTHERS * OTHER_S
        restart_s = OTHER_S + cluster.start_timeout_s + GRACE_S
        return (1 + calls) * call_s + losses * ((cluster.max_restarts + 2) * restart_s + LONGEST_DELAY_S)

    @property
    def most_calls(self):
        """Calls of runners for a step.

        One that does well completes a chunk, of which there are at most as many as prompts may be under way. One that
        does not is followed by another, and if its runner is lost, by one for each chunk that was there.

        Where calls go on to fail: of the rows that have not been in quarantine each epoch has at least one, which goes
        there or stays. `max_restarts` results of a chunk are lost, and a runner as often in a row, and while another
        one's call lasts, after each of its delays.
        """
        loop, dynamic = self.config.coordinator, self.config.algorithm.dynamic_sampling
        prompts = loop.samples_ahead // loop.samples_per_prompt
        if not self.again:
            return prompts + len(self.calls) * (1 + prompts)
        visits = (prompts * (dynamic.max_batches if dynamic else 1) + self.rows) * self.rows
        losses = self.config.cluster.max_restarts + 1
        delays = DELAYS + int(episodes_deadline_s(self.config) / LONGEST_DELAY_S)
        return visits * losses * self.workers * (losses + delays) * prompts

    def check_ledger(self):
        with closing(open_for_reading(self.ledger.path)) as db:
            assert audit(db, ended=False) == []
        assert self.ledger.open_keys() == set(self.coordinator.open_keys()), "a key is lost"

    # Workers

    async def delay(self):
        await asyncio.sleep(OTHER_S * self._random.random())

    async def forward(self, rank, method, *_, **__):
        await self.delay()

    async def score(self, rank, method, rollouts, prompts):
        await self.delay()
        if any(rollout.lost for rollout in rollouts):
            raise WorkerLost("an argument of score_each was lost", "reward", rank, 1, method, "result")
        for rollout in rollouts:
            require_outcomes([SimpleNamespace(key=key, prompt="p", response="r", episode=episode)
                              for key, episode in zip(rollout.keys, rollout.episodes, strict=True)])
        return rollouts

    async def assemble(self, rank, method, *arguments, **columns):
        await self.delay()
        if method == "select_samples":
            return kept_of(*arguments)
        if method == "sift":
            return [sifted(rollout) for rollout in arguments[1]]
        if method == "keep_samples":
            kept = [kept_of(rollout, numbers) for numbers, rollout in
                    zip(arguments[0], columns["rollouts"], strict=True) if numbers]
            return *kept, "rewards", "reference"
        assert method == "assemble"
        rollouts = columns["rollouts"]
        return *(["experience"] * len(rollouts)), [
            self.summary(each.keys, each.version, scores=np.array(scores_of(each), np.float32),
                         episodes=episode_numbers(each.episodes)) for each in rollouts]

    async def learn(self, rank, method, *arguments):
        await asyncio.sleep(UPDATE_S * self._random.random() if method == "update" else OTHER_S)
        if method == "update":
            return UpdateStats(step=arguments[0], applied=1, skipped=0, seconds=0.1, tokens=1, metrics={"loss": 1.0})
        return None

    async def publish(self, version):
        await self.delay()
        self.runners.version = version
        return Published(0.1, 0.01, 2**20)

    async def save(self):
        """A checkpoint, as `Recovery` makes it."""
        check_open_samples(self.coordinator, f"step {self.state.step}")
        self.saves += 1
        copy = self.directory / f"copy_{self.saves}_{self.state.step}.sqlite"
        copy.unlink(missing_ok=True)
        self.ledger.save(copy)
        summaries = {chunk.place.plain(): chunk.summary for chunk in self.buffer.ready()}
        self.saved = Saved(self.state.state_dict(self.buffer.under_way()), self.buffer.state_dict(), summaries, copy,
                           self.state.step)
        self.ledger.mark_committed(self.state.step)
        return 0.0


def scores_of(rollout):
    """NaN for the masked, as `RewardScorer` gives them."""
    own = {"train": lambda number: 1.0 if rollout.equal else float(number), "zero": lambda _: 0.0,
           "mask": lambda _: np.nan}
    return [own[episode.use](number) for number, episode in enumerate(rollout.episodes)]


def sifted(rollout):
    """Keep the prompts whose scores differ."""
    scores = {}
    for key, score in zip(rollout.keys, scores_of(rollout), strict=True):
        scores.setdefault(key.row, set()).update([] if np.isnan(score) else [score])
    kept = [number for number, key in enumerate(rollout.keys) if len(scores[key.row]) > 1]
    return Sifted(kept, {"score": [1.0] * (len(rollout.keys) - len(kept))})


def kept_of(rollout, numbers):
    """Some samples of a rollout."""
    return replace(rollout, keys=[rollout.keys[number] for number in numbers],
                   episodes=[rollout.episodes[number] for number in numbers])


async def _silence(*_, **__):
    pass

