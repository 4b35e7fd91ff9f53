"""`rlhf-ray preferences`: two responses to each prompt, ranked by a judge, as data for a reward model."""

import asyncio
import json
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from rlhf_ray.config.combination_checks import check_combinations
from rlhf_ray.config.rewards import FunctionReward
from rlhf_ray.config.run import PlacementConfig
from rlhf_ray.config.scorer_names import scorer_rewards
from rlhf_ray.config.stages import PreferencesStageConfig
from rlhf_ray.coordinator.rollout_source import PromptSource, RolloutSource, chunks_at_a_time, reopened
from rlhf_ray.coordinator.stop import StopRequest
from rlhf_ray.data.contents import Contents
from rlhf_ray.files.writing import write_atomically
from rlhf_ray.models.model_families import Use, check_family
from rlhf_ray.observability.faults import FaultLog
from rlhf_ray.observability.progress import StageProgress
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.observability.start_phases import START
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.chunk import Chunk
from rlhf_ray.roles.data_readers import PromptReader
from rlhf_ray.roles.engines.vllm_adapter import refuse_open_serialization
from rlhf_ray.roles.generator import Generator
from rlhf_ray.roles.pair_ranker import PairRanker
from rlhf_ray.stages.one_go import run_in_one_go
from rlhf_ray.stages.preflight import (
    check_context,
    check_data,
    check_engine,
    check_first_rows,
    check_fit,
    check_model,
    check_stop_tokens,
)
from rlhf_ray.stages.prints import Printing, prints_shown
from rlhf_ray.stages.reward_preflight import check_prompt_answers, check_reads_longest
from rlhf_ray.stages.reward_trial import trials_of
from rlhf_ray.stages.runtime import Runtime, open_runtime, write_left_out
from rlhf_ray.stages.scorers import check_scorer, rewards_of
from rlhf_ray.workers.detectors import HeartbeatDetector, TokenProgress
from rlhf_ray.workers.dispatcher import WorkerDispatcher
from rlhf_ray.workers.health_monitor import HealthMonitor, as_started
from rlhf_ray.workers.role_table import GENERATOR


def run(config: PreferencesStageConfig, resume: bool = False) -> dict[str, Any]:
    """Sample and rank all pairs; when resuming, a finished file is kept.

    Raises:
        RLHFError: the command failed; the message says what to do.
    """
    return run_in_one_go(config, resume, preflight, _run)


def preflight(config: PreferencesStageConfig) -> None:
    """Refuse a configuration that cannot work, before anything starts; raises the same errors as `run`."""
    check_combinations(config)
    refuse_open_serialization()
    check_engine(config.cluster, config.generator)
    check_data(config.prompts)
    check_model(config.model, "model")
    check_family(config.model, "model", {Use.GENERATION})
    check_first_rows(config.prompts, config.model)
    check_fit(config)
    check_scorer(config.pairs.judge, config.model, "pairs.judge", trials_of([config.prompts], config.model))
    for name, reward in rewards_of(config.pairs.judge, "pairs.judge").items():
        check_reads_longest(reward, config.model, config.longest_sample, config.longest_sample_field)
        check_prompt_answers([config.prompts], f"pairs.judge ({name})", name, reward)
    check_context(config.model, config.longest_sample, config.longest_sample_field)
    check_stop_tokens(config.model, config.generator.sampling, "generator.sampling.stop_token_ids")


async def _run(config: PreferencesStageConfig, directory: RunDirectory) -> dict[str, Any]:
    began = time.perf_counter()
    with StopRequest(print, directory.files.hurry).listening():
        pairs, left_out = await _sample_pairs(config, directory)
    output = directory.preferences
    lines = "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs)
    await directory.files.records.run(write_atomically, output, lines.encode(), directory.term)
    return {"stage": "preferences", "pairs": len(pairs), "left_out": left_out, "output": str(output),
            "seconds": time.perf_counter() - began}


async def _sample_pairs(config: PreferencesStageConfig, directory: RunDirectory) -> tuple[list[dict[str, Any]], int]:
    async with open_runtime(config) as runtime:
        log = FaultLog(directory.faults, print, print, directory.term, directory.files.records)
        START.begin("workers", "starting workers")
        sampler = await _Sampler.start(config, runtime, HealthMonitor(config.cluster, log))
        await write_left_out(directory, sampler.prompts.left_out)
        with StageProgress("preferences", sampler.prompts.rows) as progress:
            for report in sampler.prompts.reports:
                progress.note(report)
            progress.note(START.ready())
            async with sampler.watched(), sampler.prints_shown(progress):
                pairs, left_out = await sampler.sample_all(progress)
            progress.note(f"{len(pairs)} pairs, {left_out} left out with a margin under {config.pairs.min_margin}")
    return pairs, left_out


class _Sampler:
    """Generators, a ranker and a prompt reader, which are replaced when they are lost."""

    def __init__(self, config: PreferencesStageConfig, runtime: Runtime, health: HealthMonitor) -> None:
        self._config = config
        self._health = health
        model = config.model
        generation = config.generator
        pool = PlacementConfig(pool=config.generator.pool, cpus=0)
        self._generators = runtime.spawn_role(GENERATOR, lambda rank: {
            "model": model, "generation": generation, "seed": config.run.seed, "max_context": config.longest_sample,
            "name": f"generator/{rank}"})
        self._dispatcher = WorkerDispatcher(self._generators, health)
        self._judge = judge = scorer_rewards(config.pairs.judge, "pairs.judge")
        ranker = runtime.spawn("pair_ranker", PairRanker, pool,
                               lambda _: {"model": model, "judge": judge, "min_margin": config.pairs.min_margin,
                                          "longest": config.longest_sample}, shutdown=PairRanker.stop)
        self._ranker = WorkerDispatcher(ranker, health)
        reader = runtime.spawn("prompt_reader", PromptReader, pool,
                                   lambda _: {"model": model, "directory": Path(config.run.dir).absolute(),
                                              "rewards": {f"pairs.judge ({n})": reward for n, reward in judge.items()}})
        self._reader = WorkerDispatcher(reader, health)
        self.prompts: PromptSource

    @classmethod
    async def start(cls, config: PreferencesStageConfig, runtime: Runtime, health: HealthMonitor) -> "_Sampler":
        """Start all workers and read the prompts."""
        self = cls(config, runtime, health)
        dispatchers = self._dispatcher, self._ranker, self._reader
        await asyncio.gather(*(dispatcher.group.start() for dispatcher in dispatchers))
        await self._generators.call(0, Generator.compare_with_transformers).done()
        contents: dict[str, Contents] = {}
        open_again = reopened(self._reader.group, {"training": config.prompts}, contents)
        for dispatcher in dispatchers:
            health.register(dispatcher.scheduler, open_again if dispatcher is self._reader else as_started)
        self.prompts = await PromptSource.open(self._reader, "training", config.prompts)
        contents["training"] = self.prompts.contents
        return self

    def watched(self) -> AbstractAsyncContextManager[None]:
        """Replace workers that are silent during the enclosed work."""
        timeout_s = self._config.cluster.heartbeat_timeout_s
        return self._health.at_work([HeartbeatDetector(self._health.watched, timeout_s, self._health.silent),
                                     TokenProgress(self._dispatcher.scheduler, self._health, timeout_s)])

    def prints_shown(self, progress: StageProgress) -> AbstractAsyncContextManager[None]:
        """Show what the judge's functions print during the enclosed work."""
        functions = any(isinstance(reward, FunctionReward) for reward in self._judge.values())
        return prints_shown([Printing(self._ranker.group, PairRanker.printed)] if functions else [], progress.note)

    async def sample_all(self, progress: StageProgress) -> tuple[list[dict[str, Any]], int]:
        """All pairs in the order of their prompts, and the number of pairs left out."""
        per_chunk = max(1, self._config.generator.chunk // 2)
        count = self.prompts.rows
        chunks = [range(i, min(i + per_chunk, count)) for i in range(0, count, per_chunk)]
        in_flight = asyncio.Semaphore(chunks_at_a_time(self._config.generator, len(self._generators)))
        rollouts = RolloutSource(self._dispatcher, self.prompts, self._config.run.seed)
        finished = 0

        async def one(rows: range) -> list[dict[str, Any] | None]:
            nonlocal finished
            async with in_flight:
                pairs = await self._sample(rollouts, rows)
            finished += len(rows)
            progress.update(finished)
            return pairs

        sampled = [pair for part in await asyncio.gather(*(one(rows) for rows in chunks)) for pair in part]
        pairs = [pair for pair in sampled if pair is not None]
        return pairs, len(sampled) - len(pairs)

    async def _sample(self, rollouts: RolloutSource, rows: range) -> list[dict[str, Any] | None]:
        keys = [SampleKey(0, row, sample) for row in rows for sample in (0, 1)]
        chunk = Chunk.outside(keys)
        await rollouts.generate(chunk)
        return await self._ranker.value(PairRanker.rank, chunk.rollout, chunk.prompts, phase="rank")
