"""Processes that come, go, or have a GPU each, and a whole run."""

import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks.gpu_check import measures
from benchmarks.gpu_check.pair import SEED, TIMEOUT_S, make_models, pair
from benchmarks.gpu_check.pair_settings import ON_CPU, ON_GPU, PROMPT_TOKENS, PairSetting, Scale
from benchmarks.gpu_check.rows import Row, judged, not_run
from benchmarks.gpu_check.runner import Place
from rlhf_ray.data.synthetic_reviews import make_openings
from rlhf_ray.failpoints import EXIT_CODE, VARIABLE

STEPS, KILLED = 6, 4
"""Updates of the whole run; the one after which its driver is ended."""
RUN_S = 600.0


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
    model = make_models(place.directory, scale)["policy"]
    (place.directory / "prompts.jsonl").write_text("".join(
        json.dumps({"prompt": opening}) + "\n" for opening in make_openings(200, SEED)))
    file = place.directory / "ppo.yaml"
    file.write_text(yaml.safe_dump(_configuration(place.directory, scale, model.path)))
    ended = _command(file, {VARIABLE: f"update_consumed:exit:{KILLED}"})
    yield judged("a run whose driver is ended", f"exit code {ended}", ended == EXIT_CODE, f"after update {KILLED}")
    finished = _command(file, {}, "--resume")
    yield judged("the same, resumed", f"exit code {finished}", finished == 0)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "policy/loss" in row]
    yield judged("its updates", ", ".join(str(row["step"]) for row in rows),
                 [row["step"] for row in rows] == list(range(1, STEPS + 1)), "each once")
    gap = max(row["rollout/logprob_gap"] for row in rows)
    yield judged("log-probabilities of generator and policy", f"{gap:.2g} nats apart", gap <= scale.tolerance,
                 f"the largest mean of an update; at most {scale.tolerance:g}")
    yield Row("a step", f"{median(row['time/step'] for row in rows):.1f} s", f"{scale.rows} responses")


def _command(file: Path, environment: dict[str, str], *more: str) -> int:
    """Exit code of `rlhf-ray ppo`."""
    command = [sys.executable, "-m", "rlhf_ray.cli.main", "ppo", str(file), *more]
    return subprocess.run(command, env={**os.environ, **environment}, timeout=RUN_S, check=False).returncode


def _configuration(directory: Path, scale: Scale, model: str) -> dict[str, Any]:
    """All roles on one GPU, which generators and learners use in turns; on the CPU in a rehearsal."""
    def role(gpus: float, **more: Any) -> dict[str, Any]:
        return {"cpus": 0.3, **({"gpus": gpus} if scale.gpu else {}), **more}

    learner = {"micro_batch_tokens": 16 * scale.context,
               **({"autocast": "bfloat16", "offload_between_phases": True} if scale.gpu else {})}
    engine = {"gpu_memory_utilization": 0.3, "sleep_level": 1} if scale.gpu else {"kv_cache_mb": 64}
    return {
        "run": {"dir": str(directory / "run"), "steps": STEPS, "seed": SEED},
        "pools": {"default": {"cpus": 2, **({"gpus": 1} if scale.gpu else {})}},
        "model": {"path": model, "dtype": scale.dtype},
        "prompts": {"path": str(directory / "prompts.jsonl"), "max_tokens": PROMPT_TOKENS},
        "rewards": {"letters": {"type": "regex", "pattern": "^[a-zA-Z ]+$"}},
        "generator": role(0.4, max_sequences=scale.rows, sampling={"max_tokens": scale.response}, **engine),
        "policy": role(0.3, **learner), "critic": role(0.2, **learner),
        "reference": role(0.1), "reward": {"cpus": 0.1}, "assembler": {"cpus": 0.1},
        "coordinator": {"prompts_per_step": scale.rows}, "checkpoint": {"every": 2}, "weights": {"transport": "auto"},
    }
