"""What is measured of a generator and a learner: weights that arrive whole, how fast each role is, who gives memory
back, what is held."""

import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from statistics import median

import numpy as np
import psutil

from benchmarks.gpu_check.pair import SEED, Pair
from benchmarks.gpu_check.pair_settings import ALGORITHM, PROMPT_TOKENS, PairSetting
from benchmarks.gpu_check.rows import Row, judged, not_run
from rlhf_ray.config.load import resolve
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.planning.hardware import CORE, Hardware
from rlhf_ray.planning.model_lookup import shape_of
from rlhf_ray.planning.roles import roles_of
from rlhf_ray.records import Experience, Prompts, Rollout, SampleKey, offsets_of
from rlhf_ray.roles.generator import Generator
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.workers.worker_group import WorkerGroup

PROMPT = 8
"""Tokens."""
GIB = 2**30
PLAN_WITHIN = 0.15


def prompts(rows: int) -> Prompts:
    """Random ones."""
    tokens = np.random.default_rng(SEED).integers(5, 1000, rows * PROMPT).astype(np.int32)
    return Prompts(offsets_of([PROMPT] * rows), tokens, [""] * rows, [{} for _ in range(rows)], np.arange(rows))


async def draw(pair: Pair, epoch: int) -> tuple[Rollout, float]:
    """A response to each prompt, and seconds."""
    rows = pair.setting.scale.rows
    keys, began = [SampleKey(epoch, row, 0) for row in range(rows)], time.perf_counter()
    (rollout,) = await pair.roles.generators.values(Generator.generate, prompts(rows), keys, SEED)
    return rollout, time.perf_counter() - began


async def gap(pair: Pair, epoch: int) -> float:
    """Mean difference of generator's and learner's log-probabilities of new responses."""
    rollout, _ = await draw(pair, epoch)
    (ours,) = await pair.roles.policy.values(PolicyLearner.logprobs, rollout)
    return float(np.abs(ours.values - rollout.logprobs)[rollout.response_mask].mean())


async def in_buckets(pair: Pair, version: int, sizes: Sequence[int]) -> AsyncIterator[Row]:
    """`publications` in buckets of some sizes, in MiB."""
    for number, mib in enumerate(sizes):
        await pair.sync.forget()
        pair.sync.config = pair.sync.config.model_copy(update={"bucket_mb": mib})
        async for row in publications(pair, version + 10 * number, differ=not number):
            yield row


async def publications(pair: Pair, version: int, differ: bool = True) -> AsyncIterator[Row]:
    """Publish some times; the first opens connections and is not counted.

    Args:
        differ: the generator has other weights before.
    """
    setting, scale = pair.setting, pair.setting.scale
    before = await gap(pair, version)
    made = [await pair.sync.publish(version + i) for i in range(scale.publications + 1)][1:]
    after = await gap(pair, version + 50)
    seconds, pause = median(p.seconds for p in made), median(p.pause_seconds for p in made)
    name = setting.transport + (" over gloo" if setting.transport == "nccl" and not scale.gpu else "")
    right = after <= scale.tolerance and (before > scale.tolerance) == differ
    name += f" in buckets of {pair.sync.config.bucket_mb} MiB"
    yield judged(f"parity after {name}, ZeRO-{setting.zero_stage}", f"{after:.2g}", right,
                 f"mean difference of log-probabilities, {before:.2g} before; at most {scale.tolerance:g}")
    yield Row(f"publication by {name}", f"{made[0].nbytes / seconds / 1e9:.2f} GB/s",
              f"{made[0].nbytes / 1e6:,.0f} MB in {seconds:.3f} s, generation paused {pause:.3f} s")


async def speeds(pair: Pair, device: Hardware | None) -> AsyncIterator[Row]:
    """Tokens a second of generator and learner, and the share of the GPU's peak that the learner reaches."""
    await draw(pair, 100)
    rollout, seconds = await draw(pair, 101)
    made = int(rollout.response_mask.sum())
    yield Row("generation", f"{made / seconds:,.0f} tokens/s", f"{made:,} tokens, {len(rollout)} at a time")
    experience = await as_experience(pair, rollout)
    await update(pair, experience, 1)
    seconds = await update(pair, experience, 2)
    shape = shape_of(pair.policy, "model")
    flops = 3 * sum(shape.row_flops(float(length)) for length in np.diff(rollout.offsets))
    note = f"{flops / seconds / 1e12:.3g} TFLOP/s"
    yield Row("update", f"{len(rollout.tokens) / seconds:,.0f} tokens/s",
              f"{note}, {flops / seconds / device.flops:.0%} of the peak" if device else note)


async def as_experience(pair: Pair, rollout: Rollout) -> Experience:
    """The rollout with random advantages."""
    (old,) = await pair.roles.policy.values(PolicyLearner.logprobs, rollout)
    values = np.random.default_rng(SEED).standard_normal(len(rollout.tokens))
    advantages = np.where(rollout.response_mask, values, 0).astype(np.float32)
    return Experience(
        offsets=rollout.offsets, tokens=rollout.tokens, response_mask=rollout.response_mask,
        behaviour_logprobs=rollout.logprobs, old_logprobs=old.values, reference_logprobs=old.values,
        values=np.zeros_like(advantages), advantages=advantages, returns=advantages, keys=list(rollout.keys))


async def update(pair: Pair, experience: Experience, step: int) -> float:
    """Seconds of one optimizer step over all rows.

    Raises:
        RuntimeError: it was not applied.
    """
    began = time.perf_counter()
    (stats,) = await pair.roles.policy.values(PolicyLearner.update, step, 0.0, experience)
    if not stats.applied:
        raise RuntimeError("an optimizer step was left out: a loss or gradient was not finite")
    return time.perf_counter() - began


async def turns(pair: Pair, version: int) -> AsyncIterator[Row]:
    """Both give their memory back, an update, a publication: the way of a step where they share a GPU."""
    roles, scale, rollout = pair.roles, pair.setting.scale, (await draw(pair, 200))[0]
    asleep = scale.gpu and pair.setting.sleep_level > 0
    experience = await as_experience(pair, rollout)
    await update(pair, experience, 2)  # AdamW has no state before the first
    await roles.policy.values(PolicyLearner.offload_state)
    freed = {}
    if asleep:
        awake = held(roles.generators, gpu=True)
        await roles.generators.values(Generator.sleep)
        freed["generator"] = _freed(awake, held(roles.generators, gpu=True))
        whole = held(roles.policy, gpu=True)
        await roles.policy.values(PolicyLearner.reload_state)
        freed["learner"] = _freed(held(roles.policy, gpu=True), whole)
    else:
        await roles.policy.values(PolicyLearner.reload_state)
    await update(pair, experience, 3)
    await roles.policy.values(PolicyLearner.offload_state)
    if asleep:
        await roles.generators.values(Generator.wake, ["weights"])
    # All of it: generators that slept at level 2 dropped what they had.
    await pair.sync.publish(version, resend=pair.setting.sleep_level != 1)
    if asleep:
        await roles.generators.values(Generator.wake, ["kv_cache"])
    after = await gap(pair, 201)
    note = ", ".join(f"{role} gave back {text}" for role, text in freed.items()) or "sleep is for GPUs"
    level = f", sleep level {pair.setting.sleep_level}" if asleep else ""
    yield judged(f"a step in turns{level}", f"{after:.2g}", after <= scale.tolerance,
                 f"parity afterwards, at most {scale.tolerance:g}; {note}")


def _freed(before: float | None, after: float | None) -> str:
    return "an unknown amount" if before is None or after is None else f"{(before - after) / GIB:.1f} GiB"


def memory(pair: Pair, device: Hardware | None) -> Iterator[Row]:
    """Measured against planned."""
    gpu, plan = pair.setting.scale.gpu, planned(pair.setting, pair.policy, device)
    for group in (pair.roles.generators, pair.roles.policy):
        found = held(group, gpu)
        if found is None:
            yield not_run(f"memory of {group.role}", "nvidia-smi names no process of ours")
            continue
        off = found / plan[group.role] - 1
        what, note = f"memory of {group.role}", f"planned {plan[group.role] / GIB:.2f} GiB ({off:+.0%})"
        # A tiny model's process is nearly all libraries, and the plan is made for others.
        yield (judged(what, f"{found / GIB:.2f} GiB", abs(off) <= PLAN_WITHIN, f"{note}, within {PLAN_WITHIN:.0%}")
               if gpu else Row(what, f"{found / GIB:.2f} GiB", note))


MIB = 2**20


def held(group: WorkerGroup, gpu: bool) -> float | None:
    """Bytes of a group's first worker with all its processes: on GPUs, or in main memory that nobody else has. None
    where the driver does not tell, as in containers with process numbers of their own."""
    processes = group.processes(0)
    pids = {pid for pid, _ in processes.members} if processes else set()
    if not gpu:
        return float(sum(psutil.Process(pid).memory_full_info().uss for pid in pids if psutil.pid_exists(pid)))
    program = shutil.which("nvidia-smi") or "nvidia-smi"
    answer = subprocess.run([program, "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"],
                            capture_output=True, text=True, timeout=30, check=True)
    rows = [line.split(", ") for line in answer.stdout.splitlines() if line.strip()]
    found = [float(mib) * MIB for pid, mib in rows if int(pid) in pids and mib.isdecimal()]
    return sum(found) if found else None


def planned(setting: PairSetting, model: ModelConfig, device: Hardware | None) -> dict[str, float]:
    """Bytes of each role where its model lies, as `rlhf-ray plan` has them for a run with these sections."""
    config = resolve(PPOConfig.model_validate({
        "model": model, "rewards": {"main": {"type": "model", "path": model.path}},
        "prompts": {"path": "prompts.jsonl", "max_tokens": PROMPT_TOKENS}, "algorithm": ALGORITHM,
        "generator": setting.generation, "policy": setting.policy,
        "coordinator": {"prompts_per_step": setting.scale.rows},
        "pools": {"default": setting.pool.model_copy(update={"cpus": 8.0})},
    }))
    roles = {role.name: role for role in roles_of(config, lambda _, field: shape_of(model, field))}
    found = {}
    for section, name in (("generator", "generator"), ("policy", "policy_learner")):
        memory = roles[section].memory(device or CORE)
        found[name] = memory.device_bytes if setting.scale.gpu else memory.host_bytes
    return found
