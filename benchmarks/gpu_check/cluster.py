"""Processes that come, go, or have a GPU each, and a whole run."""

import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks.gpu_check import measures
from benchmarks.gpu_check.pair import SEED, TIMEOUT_S, make_models, pair
from benchmarks.gpu_check.pair_settings import (
    ON_CPU,
    ON_GPU,
    PROMPT_TOKENS,
    PairSetting,
    Scale,
    engine_arguments,
)
from benchmarks.gpu_check.rows import Row, judged, not_run
from benchmarks.gpu_check.runner import LEAVING_S, Place
from rlhf_ray.data.synthetic_reviews import make_openings
from rlhf_ray.failpoints import EXIT_CODE, VARIABLE
from rlhf_ray.planning.hardware import Hardware, gpu_of
from rlhf_ray.planning.model_lookup import shape_of
from rlhf_ray.planning.model_shape import ModelShape

STEPS, KILLED = 4, 3
"""Updates of the whole run; the one after which its driver is ended."""
AGAIN = 0.8
"""What the resumed run takes of the first one's time: as long a start, and fewer steps."""
RUN_S = 600.0
PHASES = ("generate", "reward", "reference", "logprobs", "values", "policy_update", "critic_update", "publish")
EPOCHS = 2
"""Of an update over the step's responses."""


async def restart(place: Place) -> AsyncIterator[Row]:
    """The generator is killed and started again beside the learner, which keeps its memory, and catches up."""
    scale = ON_GPU if place.gpu else ON_CPU
    async with pair(PairSetting(scale), place.directory) as both:
        generators = both.roles.generators
        await both.sync.publish(1)
        await generators.respawn(0, "the check killed it")
        began = time.perf_counter()
        await generators.start(timeout_s=TIMEOUT_S)
        seconds = time.perf_counter() - began
        before = await measures.gap(both, 1)
        await both.sync.publish(2, resend=True)
        after = await measures.gap(both, 2)
        yield judged("parity after a restart beside a live learner", f"{after:.2g}", after <= scale.tolerance < before,
                     f"{before:.2g} before it caught up; at most {scale.tolerance:g}")
        yield Row("start of the new generator", f"{seconds:.1f} s")


async def nccl(place: Place) -> AsyncIterator[Row]:
    """Broadcasts from one GPU to another; between CPUs over gloo, under ZeRO-3."""
    if place.gpu and len(place.gpus) < 2:
        yield not_run("publication by nccl", "NCCL joins processes with a GPU each, and here is one")
        return
    setting = PairSetting(ON_GPU, "nccl", apart=True) if place.gpu else PairSetting(ON_CPU, "nccl", zero_stage=3)
    async with pair(setting, place.directory) as both:
        async for row in measures.publications(both, version=1):
            yield row
        async for row in measures.turns(both, version=50):
            yield row


def whole_run(place: Place) -> Iterator[Row]:
    """PPO with a critic by `rlhf-ray ppo`, whose driver is ended after some updates; then `--resume`."""
    scale, run = ON_GPU if place.gpu else ON_CPU, place.directory / "run"
    began = time.perf_counter()
    model = make_models(place.directory, scale, "policy")["policy"]
    (place.directory / "prompts.jsonl").write_text("".join(
        json.dumps({"prompt": opening}) + "\n" for opening in make_openings(4 * scale.rows, SEED)))
    file = place.directory / "ppo.yaml"
    file.write_text(yaml.safe_dump(configuration(place.directory, scale, model.path)))
    yield Row("a model of random weights", f"{time.perf_counter() - began:.1f} s", "made and written")
    began = time.perf_counter()
    ended = yield from _command("a run", file, run, {VARIABLE: f"update_consumed:exit:{KILLED}"})
    seconds = time.perf_counter() - began
    yield judged("a run whose driver is ended", f"exit code {ended}", ended == EXIT_CODE,
                 f"after update {KILLED}; {seconds:.1f} s")
    yield from _phases(whole_steps(run), shape_of(model, "model"), gpu_of(place.gpus[0]) if place.gpu else None)
    if AGAIN * seconds > place.left_s:
        yield not_run("the same, resumed", f"the first took {seconds:.0f} s, and {place.left_s:.0f} s were left")
        return
    finished = yield from _command("resumed", file, run, {}, "--resume")
    yield judged("the same, resumed", f"exit code {finished}", finished == 0)
    yield from resumed_rows(whole_steps(run), STEPS, scale.tolerance)


def _command(name: str, file: Path, run: Path, environment: dict[str, str], *more: str) -> Generator[Row, None, int]:
    """Rows of the steps of `rlhf-ray ppo` as they are made; returns its exit code."""
    began = time.time()
    first = True

    def rows_of(_: subprocess.Popen[bytes], step: dict[str, Any]) -> Iterator[Row]:
        nonlocal first
        if first:
            yield Row(f"{name}: start", f"{step['time'] - step['time/step'] - began:.1f} s",
                      "until the first step begins")
            first = False
        yield Row(f"{name}: step {step['step']}", f"{step['time/step']:.2f} s",
                  ", ".join(f"{phase} {step.get(f'time/{phase}', 0.0):.2f}" for phase in PHASES)
                  + f"; log-probabilities {step['rollout/logprob_gap']:.2g} nats apart")

    return (yield from run_rows(file, run, rows_of, environment, *more))


def run_rows(file: Path, run: Path, rows_of: Callable[[subprocess.Popen[bytes], dict[str, Any]], Iterator[Row]],
             environment: Mapping[str, str], *more: str) -> Generator[Row, None, int]:
    """Rows of the steps of `rlhf-ray ppo` as they are made; returns its exit code.

    Args:
        rows_of: gives those of a step, which may end the process.
        environment: more variables of the process.

    Raises:
        TimeoutError: it is not done within `RUN_S`.
    """
    shown = len(whole_steps(run))
    end = time.monotonic() + RUN_S
    process = subprocess.Popen([sys.executable, "-m", "rlhf_ray.cli.main", "ppo", str(file), *more],
                               env={**os.environ, **environment})
    try:
        code = None
        while code is None:
            if time.monotonic() > end:
                raise TimeoutError(f"rlhf-ray ppo was not done within {RUN_S:g} s")
            time.sleep(0.1)
            code = process.poll()
            for step in whole_steps(run)[shown:]:
                shown += 1
                yield from rows_of(process, step)
        return code
    finally:
        process.terminate()
        process.wait(LEAVING_S)


def resumed_rows(steps: Sequence[dict[str, Any]], last: int, tolerance: float) -> Iterator[Row]:
    """What a run has to show that was ended and resumed: each of its updates once, and small differences of
    log-probabilities.

    Args:
        last: step.
        tolerance: in nats.
    """
    yield judged("its updates", ", ".join(str(row["step"]) for row in steps),
                 [row["step"] for row in steps] == list(range(1, last + 1)), "each once")
    gap = max(row["rollout/logprob_gap"] for row in steps)
    yield judged("log-probabilities of generator and policy", f"{gap:.2g} nats apart", gap <= tolerance,
                 f"the largest mean of an update; at most {tolerance:g}")


def whole_steps(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics of all whole steps so far."""
    file = run / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [row for row in map(json.loads, lines) if "policy/loss" in row]


def _phases(steps: list[dict[str, Any]], shape: ModelShape, device: Hardware | None) -> Iterator[Row]:
    """Medians of the steps after the first, in which kernels are compiled and connections are opened."""
    usual = steps[1:] or steps
    if not usual:
        return

    def middle(name: str) -> float:
        return float(median(row.get(name, 0.0) for row in usual))

    seconds = middle("time/step")
    rows, tokens = (seconds * middle(f"throughput/{unit}_per_second") for unit in ("samples", "tokens"))
    flops = rows * shape.row_flops(tokens / rows)
    head = 2 * shape.vocabulary * shape.hidden * tokens
    yield Row("a step", f"{seconds:.2f} s, {rows / seconds:,.1f} samples/s, {tokens / seconds:,.0f} tokens/s",
              f"{rows:.0f} responses, the median of {len(usual)} steps")
    rest = seconds
    for phase, operations in zip(PHASES, (flops, 0.0, flops, flops, flops - head, 3 * EPOCHS * flops,
                                          3 * EPOCHS * (flops - head), 0.0), strict=True):
        took = middle(f"time/{phase}")
        rest -= took
        note = f"{tokens / took:,.0f} tokens/s" if operations and took else ""
        if note and device is not None:
            note += f", {operations / took / device.flops:.1%} of the peak"
        yield Row(f"a step: {phase}", f"{took:.2f} s, {took / seconds:.0%}", note)
    yield Row("a step: the rest", f"{max(0.0, rest):.2f} s", "sleep and waking, optimizer states out and back, "
              f"checkpoints, calls; generation paused {middle('weights/pause_seconds'):.2f} s for a publication")


def configuration(directory: Path, scale: Scale, model: str) -> dict[str, Any]:
    """All roles on one GPU, which generators and learners use in turns; on the CPU in a rehearsal."""
    def role(gpus: float, **more: Any) -> dict[str, Any]:
        return {"cpus": 0.3, **({"gpus": gpus} if scale.gpu else {}), **more}

    # Layers are not compiled: that takes a minute at each start, for four steps.
    learner = {"micro_batch_tokens": 48 * scale.context, "compile_layers": False,
               **({"autocast": "bfloat16", "offload_between_phases": True} if scale.gpu else {})}
    engine = ({"gpu_memory_utilization": 0.3, "sleep_level": 2, "vllm": engine_arguments()} if scale.gpu
              else {"kv_cache_mb": 64})
    return {
        "run": {"dir": str(directory / "run"), "steps": STEPS, "seed": SEED}, "cluster": {"dashboard": False},
        "pools": {"default": {"cpus": 2, **({"gpus": 1} if scale.gpu else {})}},
        "model": {"path": model, "dtype": scale.dtype},
        "prompts": {"path": str(directory / "prompts.jsonl"), "max_tokens": PROMPT_TOKENS},
        "rewards": {"letters": {"type": "regex", "pattern": "^[a-zA-Z ]+$"}},
        "algorithm": {"epochs": EPOCHS},
        "generator": role(0.4, max_sequences=scale.rows, sampling={"max_tokens": scale.response}, **engine),
        "policy": role(0.3, **learner), "critic": role(0.2, **learner),
        "reference": role(0.1), "reward": {"cpus": 0.1}, "assembler": {"cpus": 0.1},
        "coordinator": {"prompts_per_step": scale.rows}, "checkpoint": {"every": 2}, "weights": {"transport": "auto"},
    }
