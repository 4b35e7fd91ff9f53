"""`python -m benchmarks.long_responses`: responses of thousands of tokens, with a model of a million parameters.

Four measurements, each in a process of its own on one thread:

- memory: peak memory of an update with rows of 512 to 8,192 tokens, as many tokens in each mini-batch, with and without
  gradient checkpointing;
- gap: log-probabilities of a generator against those of the learner, by position and by the version of the weights,
  in responses that continue while new weights are published;
- rollouts: tokens a second of the generator and of vLLM itself;
- prefix: tokens a second with and without vLLM's prefix cache, for eight samples of each long prompt.

`--dtype bfloat16` computes in bfloat16 on both sides: the engine's weights, and the learner's autocast.
"""

import argparse
import asyncio
import copy
import json
import os
import resource
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from benchmarks.__main__ import one_thread_on_cpu
from benchmarks.machine import describe_machine
from benchmarks.side_process import run_in_process
from benchmarks.summary import commit
from benchmarks.workload import SEED, VOCABULARY
from rlhf_ray.algorithms.logprob_gap import gap_histogram, gap_quantile
from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.generation import GenerationConfig, SamplingConfig
from rlhf_ray.config.learner import OptimizerConfig, PolicyConfig
from rlhf_ray.config.model import ArchitectureConfig, ModelConfig, NewModelConfig
from rlhf_ray.data.synthetic_reviews import make_reviews
from rlhf_ray.data.tokenizer import train_tokenizer
from rlhf_ray.engine.distributed import free_address
from rlhf_ray.models.loading import load_tokenizer, new_causal_lm
from rlhf_ray.records import Experience, Prompts, Rollout, SampleKey, offsets_of
from rlhf_ray.roles.generator import Generator
from rlhf_ray.roles.policy_learner import PolicyLearner

Dtype = Literal["float32", "bfloat16"]
LONGEST, PROMPT = 8192, 16
LENGTHS = (512, 1024, 2048, 4096, 8192)
RESPONSE, SAMPLES = 4096, 8
VERSIONS = 4
"""Versions of the weights that the responses of the measurement of the gap see."""
PREFIX = 1024
"""Tokens of the long prompts."""
REVIEWS = 4000
MIB = 2**20
CACHE_MB = 512


@dataclass(frozen=True)
class Memory:
    """One update."""

    row_tokens: int
    checkpointing: bool
    peak_mib: float
    """What the update added to the process's memory."""
    seconds: float


@dataclass(frozen=True)
class Gap:
    """Tokens of one version in one stretch of positions."""

    version: int
    positions: str
    tokens: int
    mean: float
    """Nats."""
    p99: float


@dataclass(frozen=True)
class Rate:
    """Tokens a second."""

    what: str
    tokens_per_second: float
    tokens: int


def make_model(directory: Path, dtype: Dtype) -> None:
    """A random model of the quickstart's shape with room for long responses."""
    train_tokenizer((review.text for review in make_reviews(REVIEWS, SEED)), VOCABULARY, directory)
    torch.manual_seed(SEED)
    architecture = ArchitectureConfig(max_positions=LONGEST + PREFIX)
    new_causal_lm(NewModelConfig(architecture=architecture, tokenizer=str(directory), dtype=dtype)).save_pretrained(
        directory)


def learner(directory: Path, dtype: Dtype, tokens: int, checkpointing: bool = False) -> PolicyLearner:
    """A policy of one rank whose micro-batches have up to `tokens` tokens."""
    torch.set_num_threads(1)
    config = PolicyConfig(micro_batch_tokens=tokens, gradient_checkpointing=checkpointing, autocast=dtype,
                          optimizer=OptimizerConfig(learning_rate=1e-3))
    made = PolicyLearner(config, ModelConfig(path=str(directory), dtype=dtype), rank=0, world=1, seed=SEED,
                         total_steps=100, algorithm=AlgorithmConfig(epochs=1, mini_batches=1), temperature=1.0,
                         longest=64)
    made.start(free_address("127.0.0.1"), timeout_s=600.0)
    return made


def experience(rows: int, length: int) -> Experience:
    """Rows of random tokens; all but the prompts are responses."""
    rng, tokens = np.random.default_rng(SEED), rows * length
    mask = np.tile(np.arange(length) >= PROMPT, rows)
    column = np.where(mask, rng.standard_normal(tokens), 0).astype(np.float32)
    logprobs = np.where(mask, -7.0, 0).astype(np.float32)
    return Experience(
        offsets=offsets_of([length] * rows), tokens=rng.integers(5, VOCABULARY, tokens).astype(np.int32),
        response_mask=mask, behaviour_logprobs=logprobs, old_logprobs=logprobs, reference_logprobs=None, values=None,
        advantages=column, returns=column, keys=[SampleKey(0, row, 0) for row in range(rows)])


def peak_mib() -> float:
    """Most memory that this process had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def memory(directory: Path, dtype: Dtype, length: int, checkpointing: bool) -> Memory:
    """An update on `LONGEST` tokens, in rows of `length`."""
    made, rows = learner(directory, dtype, length, checkpointing), experience(LONGEST // length, length)
    before, began = peak_mib(), time.perf_counter()
    made.update(1, 0.0, rows)
    return Memory(length, checkpointing, peak_mib() - before, time.perf_counter() - began)


def generation(dtype: Dtype, response: int, **vllm: Any) -> GenerationConfig:
    """Rollouts of exactly `response` tokens."""
    return GenerationConfig(
        engine="in_process", chunk=SAMPLES, max_sequences=SAMPLES, kv_cache_mb=CACHE_MB, vllm=vllm,
        sampling=SamplingConfig(max_tokens=response, min_tokens=response))


def prompts(directory: Path, rows: int, length: int) -> Prompts:
    """Random ones."""
    tokens = np.random.default_rng(SEED).integers(5, VOCABULARY, rows * length).astype(np.int32)
    return Prompts(offsets_of([length] * rows), tokens, [""] * rows, [{} for _ in range(rows)], np.arange(rows))


async def started(directory: Path, dtype: Dtype, config: GenerationConfig, context: int) -> Generator:
    """A generator in this process."""
    made = Generator(ModelConfig(path=str(directory), dtype=dtype), config, SEED, context, record_masks=True)
    await made.start()
    return made


async def gaps(directory: Path, dtype: Dtype) -> list[Gap]:
    """Responses over several versions, and the log-probabilities of each token under the weights of its version."""
    policy = learner(directory, dtype, PROMPT + RESPONSE)
    generator = await started(directory, dtype, generation(dtype, RESPONSE), PROMPT + RESPONSE)
    weights = [_copy(policy.engine.module)]
    keys = [SampleKey(0, row, 0) for row in range(SAMPLES)]
    sampling = asyncio.create_task(generator.generate(prompts(directory, SAMPLES, PROMPT), keys, SEED))
    buckets = policy.plan_weights(64 * MIB, generator.fused_groups()).whole.buckets
    for version in range(1, VERSIONS):
        while generator.tokens_made() < version * SAMPLES * RESPONSE // VERSIONS:
            await asyncio.wait([sampling], timeout=0.01)
            if sampling.done():  # it failed
                await sampling
        policy.update(version, 0.0, experience(4, 256))
        await generator.begin_weights(version, version, buckets)
        for index in range(buckets):
            bucket = policy.weight_bucket(version, index, True)
            assert bucket is not None  # of the first rank
            await generator.load_weights(bucket, version)
        await generator.finish_weights(version)
        weights.append(_copy(policy.engine.module))
    rollout = await sampling
    await generator.stop()
    return [found for version, state in enumerate(weights) for found in _of_version(policy, rollout, version, state)]


def _copy(module: nn.Module) -> dict[str, Any]:
    return copy.deepcopy(module.state_dict())


def _of_version(policy: PolicyLearner, rollout: Rollout, version: int, weights: dict[str, Any]) -> list[Gap]:
    """The gap of the tokens of one version, by positions of a quarter of the response each."""
    policy.engine.module.load_state_dict(weights)
    ours = policy.logprobs(rollout).values
    positions = np.concatenate([np.arange(length) for length in rollout.lengths]) - PROMPT
    found = []
    for first in range(0, RESPONSE, RESPONSE // 4):
        end = first + RESPONSE // 4
        chosen = torch.from_numpy((rollout.versions == version) & (first <= positions) & (positions < end))
        if not chosen.any():
            continue
        theirs, own = torch.from_numpy(rollout.logprobs), torch.from_numpy(ours)
        found.append(Gap(version, f"{first}-{end - 1}", int(chosen.sum()), float((theirs - own).abs()[chosen].mean()),
                         gap_quantile(gap_histogram(theirs, own, chosen), 0.99)))
    return found


async def generator_rate(directory: Path, dtype: Dtype) -> Rate:
    """Of our generator."""
    made = await started(directory, dtype, generation(dtype, RESPONSE), PROMPT + RESPONSE)
    keys = [SampleKey(0, row, 0) for row in range(SAMPLES)]
    began = time.perf_counter()
    rollout = await made.generate(prompts(directory, SAMPLES, PROMPT), keys, SEED)
    seconds, tokens = time.perf_counter() - began, int(rollout.response_mask.sum())
    await made.stop()
    return Rate("generator", tokens / seconds, tokens)


def vllm_rate(directory: Path, dtype: Dtype) -> Rate:
    """Of vLLM's own offline interface."""
    from vllm import LLM, SamplingParams

    end = int(load_tokenizer(ModelConfig(path=str(directory))).eos_token_id)
    engine = LLM(model=str(directory), dtype=dtype, skip_tokenizer_init=True, generation_config="vllm",
                 max_model_len=PROMPT + RESPONSE, max_num_seqs=SAMPLES, seed=SEED, enforce_eager=True,
                 enable_prefix_caching=False, kv_cache_memory_bytes=CACHE_MB * MIB,
                 logprobs_mode="processed_logprobs", disable_log_stats=True)
    table = prompts(directory, SAMPLES, PROMPT)
    asked: Any = [{"prompt_token_ids": table.row(i, "tokens").tolist()} for i in range(SAMPLES)]
    parameters = SamplingParams(max_tokens=RESPONSE, min_tokens=RESPONSE, temperature=1.0, seed=SEED,
                                stop_token_ids=[end], logprobs=0, flat_logprobs=True, detokenize=False)
    engine.generate(asked[:1], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    began = time.perf_counter()
    outputs = engine.generate(asked, parameters, use_tqdm=False)
    seconds, tokens = time.perf_counter() - began, sum(len(output.outputs[0].token_ids) for output in outputs)
    return Rate("vLLM", tokens / seconds, tokens)


async def prefix_rate(directory: Path, dtype: Dtype, cached: bool) -> Rate:
    """Eight samples of each of four long prompts, 64 tokens each."""
    config = generation(dtype, 64, enable_prefix_caching=cached)
    made = await started(directory, dtype, config, PREFIX + 64)
    keys = [SampleKey(0, row, sample) for row in range(4) for sample in range(SAMPLES)]
    began = time.perf_counter()
    rollout = await made.generate(prompts(directory, 4, PREFIX), keys, SEED)
    seconds, tokens = time.perf_counter() - began, int(rollout.response_mask.sum())
    await made.stop()
    return Rate(f"prefix cache {'on' if cached else 'off'}", tokens / seconds, tokens)


def in_loop(work: Any, *arguments: Any) -> Any:
    """Run a coroutine function in a new process."""
    return asyncio.run(work(*arguments))


def measure(directory: Path, dtype: Dtype) -> dict[str, list[Any]]:
    """All four."""
    make_model(directory, dtype)
    found: dict[str, list[Any]] = {"memory": [], "gap": [], "rollouts": [], "prefix": []}

    def add(part: str, *rows: Any) -> None:
        found[part] += rows
        for row in rows:
            print(f"{part}: {asdict(row)}", file=sys.stderr, flush=True)

    for checkpointing in (False, True):
        for length in LENGTHS:
            add("memory", run_in_process(memory, directory, dtype, length, checkpointing))
    add("gap", *run_in_process(in_loop, gaps, directory, dtype))
    add("rollouts", run_in_process(in_loop, generator_rate, directory, dtype),
        run_in_process(vllm_rate, directory, dtype))
    add("prefix", *(run_in_process(in_loop, prefix_rate, directory, dtype, cached) for cached in (False, True)))
    return found


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_responses", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures there, as JSON")
    options = parser.parse_args()
    one_thread_on_cpu()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="rlhf-ray-long-") as temporary:
        found = measure(Path(temporary), options.dtype)
    print(as_tables(found, f"{describe_machine()}, {options.dtype}, commit {commit()}"))
    if options.out:
        figures = {part: [asdict(row) for row in rows] for part, rows in found.items()}
        options.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def as_tables(found: dict[str, list[Any]], head: str) -> str:
    """The figures in Markdown, as they stand in the docs."""
    peaks: dict[int, dict[bool, float]] = {}
    for row in found["memory"]:
        peaks.setdefault(row.row_tokens, {})[row.checkpointing] = row.peak_mib
    lines = [head, "", "| tokens of a row | peak of an update, MiB | with checkpointing |", "|---:|---:|---:|",
             *(f"| {length:,} | {of[False]:,.0f} | {of[True]:,.0f} |" for length, of in peaks.items()),
             "", "| version | positions | tokens | mean gap, nats | 99 % quantile |", "|---:|---|---:|---:|---:|",
             *(f"| {g.version} | {g.positions} | {g.tokens:,} | {g.mean:.2g} | {g.p99:.2g} |" for g in found["gap"]),
             "", "| rollouts | tokens/s |", "|---|---:|",
             *(f"| {r.what} | {r.tokens_per_second:,.0f} |" for r in [*found["rollouts"], *found["prefix"]])]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
