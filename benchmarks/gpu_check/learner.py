"""`PolicyLearner` in one process, without Ray and vLLM, on random models over 128,256 tokens."""

import gc
import os
import platform
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from benchmarks.gpu_check.random_policy import (
    ALGORITHM,
    B1,
    B8,
    BUCKET,
    SEED,
    SMALL,
    TIMEOUT_S,
    TINY,
    RandomPolicy,
    Setting,
    experience,
    hardware,
    optimizer_step,
    rollout_of,
    state,
)
from benchmarks.gpu_check.rows import Row, judged, not_run
from benchmarks.gpu_check.runner import Place
from benchmarks.gpu_check.seams import seconds_of
from rlhf_ray.config.learner import LoRAConfig, OptimizerConfig
from rlhf_ray.config.stages import CriticConfig
from rlhf_ray.engine.distributed import free_address
from rlhf_ray.models.packed_model import Chunks
from rlhf_ray.records import Experience
from rlhf_ray.roles.critic_learner import CriticLearner
from rlhf_ray.roles.micro_batch import AverageMeter
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.roles.ppo_update import Update, training_batch
from rlhf_ray.roles.reference_scorer import ReferenceScorer

MFU, GOAL = 0.25, 0.40
"""Share of the GPU's peak that an update must reach, and the one to get to."""
PLAN_WITHIN = 0.10
NO_FARTHER = 1.2
"""Gradients of compiled layers over those of layers as they are, in their distance from gradients in float32."""
GAP = 0.05
"""Nats between a policy in float32 under autocast and a reference in bfloat16."""
GIB, GB = 2**30, 1e9
SAVE_S = 120.0
ROOT = Path(__file__).parents[2]
HALF = {"autocast": "bfloat16"}


def update(place: Place) -> Iterator[Row]:
    """An update of 1 billion weights, then what follows one: a publication, and the way into another phase."""
    setting = Setting(B1 if place.gpu else TINY, HALF)
    if (short := too_small(place, setting)) is not None:
        yield short
        return
    learner, rows = setting.start(place), experience(setting.size)
    yield from _updates(place, setting, learner, rows)
    yield _readings(place, learner, rows)
    yield _publication(learner)
    yield from _offload(place, learner, rows)
    learner.leave()


def adapters(place: Place) -> Iterator[Row]:
    """An update of adapters on 8 billion weights."""
    fields = {**HALF, "gradient_checkpointing": True, "lora": LoRAConfig()}
    yield from _alone(place, Setting(B8 if place.gpu else TINY, fields))


def _alone(place: Place, setting: Setting) -> Iterator[Row]:
    if (short := too_small(place, setting)) is not None:
        yield short
        return
    learner = setting.start(place)
    yield from _updates(place, setting, learner, experience(setting.size))
    learner.leave()


def too_small(place: Place, setting: Setting) -> Row | None:
    """A row instead of an update that does not fit on this GPU."""
    device, planned = hardware() if place.gpu else None, setting.plan(place).device_bytes
    if device is None or planned <= device.usable_memory * device.memory_bytes:
        return None
    return not_run("an update", f"it is planned to take {planned / GIB:.0f} GiB, and this GPU has "
                                f"{device.memory_bytes / GIB:.0f}")


def _updates(place: Place, setting: Setting, learner: RandomPolicy, rows: Experience) -> Iterator[Row]:
    """Precision of the first update, speed and memory of the second."""
    seen: set[torch.dtype] = set()
    head = learner.engine.module.model.get_output_embeddings()
    watch = head.register_forward_hook(lambda *call: seen.add(call[-1].dtype))
    optimizer_step(learner, rows, 1)
    watch.remove()
    yield judged("precision of the logits", ", ".join(map(str, seen)), seen == {torch.bfloat16},
                 "inside the forward pass; bfloat16 is configured")
    highest = torch.cuda.max_memory_allocated() if place.gpu else 0
    if place.gpu:
        torch.cuda.reset_peak_memory_stats()
    yield _utilization(place, setting, optimizer_step(learner, rows, 2))
    yield from _memory(place, setting, highest)


def _utilization(place: Place, setting: Setting, seconds: float) -> Row:
    speed, share = rate(place, setting, seconds)
    size, device = setting.size, hardware() if place.gpu else None
    note = f"{setting.shape(place).parameters / 1e6:,.1f} million weights, {size.rows} rows of {size.length} tokens"
    if device is None:
        return Row("speed of an update", speed, note)
    return judged("speed of an update", speed, share >= MFU,
                  f"{note}; at least {MFU:.0%} of {device.flops / 1e12:,.0f} TFLOP/s, the goal is {GOAL:.0%}")


def rate(place: Place, setting: Setting, seconds: float) -> tuple[str, float]:
    """The speed of an update, in words and as a share of the GPU's peak: operations of the model alone, recomputed ones
    not counted."""
    size, shape = setting.size, setting.shape(place)
    unused = 2 * shape.vocabulary * shape.hidden * (size.rows * size.length - size.predicted)
    passes = 2 if "lora" in setting.fields else 3  # frozen weights have no gradients
    flops = passes * (size.rows * shape.row_flops(size.length) - unused) / seconds
    speed = f"{size.rows * size.length / seconds:,.0f} tokens/s, {flops / 1e12:.3g} TFLOP/s"
    device = hardware() if place.gpu else None
    if device is None:
        return speed, 0.0
    return f"{flops / device.flops:.1%} of the peak, {speed}", flops / device.flops


def _memory(place: Place, setting: Setting, highest: int) -> Iterator[Row]:
    """The GPU's memory, CUDA's context included, against the plan's.

    Args:
        highest: bytes allocated before the measured update, while the learner started.
    """
    if not place.gpu:
        yield not_run("memory of an update", "CUDA's allocator counts it")
        return
    free, total = torch.cuda.mem_get_info()
    context, planned = total - free - torch.cuda.memory_reserved(), setting.plan(place).device_bytes
    held = torch.cuda.max_memory_allocated() + context
    off = held / planned - 1
    yield judged("memory of an update", f"{held / GIB:.2f} GiB, planned {planned / GIB:.2f} ({off:+.0%})",
                 abs(off) <= PLAN_WITHIN,
                 f"within {PLAN_WITHIN:.0%}; {context / GIB:.2f} GiB of it CUDA's; torch reserved "
                 f"{torch.cuda.max_memory_reserved() / GIB:.2f} GiB")
    yield judged("memory of the start", f"{(highest + context) / GIB:.2f} GiB",
                 highest + context <= planned * (1 + PLAN_WITHIN), "the highest up to the first update; not above the "
                                                                   f"plan by more than {PLAN_WITHIN:.0%}")


def _readings(place: Place, learner: RandomPolicy, rows: Experience) -> Row:
    """How often the passes of an optimizer step read a number from the GPU, each time waiting for all its work."""
    what = "readings from the GPU in the passes of an update"
    if not place.gpu:
        return not_run(what, "torch counts them on GPUs")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            batch = training_batch([rows], whiten=False)
            shares = sum(1 for _ in learner.shares(batch, lambda part: learner.loss(part, Update()), AverageMeter()))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = [f"{Path(one.filename).name}:{one.lineno}" for one in found if "called a synchroniz" in str(one.message)]
    return judged(what, f"{len(places)} in {shares} passes", not places,
                  ", ".join(["none, so that the CPU stays ahead of the GPU", *sorted(set(places))]))


def _publication(learner: RandomPolicy) -> Row:
    """All buckets of the weights as they are sent through the object store."""
    plan = learner.plan_weights(BUCKET, [])

    def all_buckets() -> None:
        for index in range(plan.whole.buckets):
            learner.weight_bucket(1, index)

    first = seconds_of_one(all_buckets)
    seconds = seconds_of_one(all_buckets)
    nbytes = plan.whole.nbytes
    return Row("buckets of a publication", f"{nbytes / seconds / GB:.2f} GB/s",
               f"{nbytes / 1e6:,.0f} MB gathered, cast, copied to main memory and sealed in {seconds:.2f} s, and in "
               f"{first:.2f} s the first time, when memory is pinned")


def _offload(place: Place, learner: RandomPolicy, rows: Experience) -> Iterator[Row]:
    """The optimizer's state out of the GPU and back, and an update with it."""
    before, held = digest(state(learner)), torch.cuda.memory_allocated() if place.gpu else 0
    first = [seconds_of_one(move) for move in (learner.offload_state, learner.reload_state)]
    seconds = [seconds_of_one(learner.offload_state)]
    freed = held - torch.cuda.memory_allocated() if place.gpu else 0
    seconds.append(seconds_of_one(learner.reload_state))
    same = digest(state(learner)) == before
    optimizer_step(learner, rows, 3)
    times = f"{seconds[0]:.2f} s out, {seconds[1]:.2f} s back"
    yield judged("offload between phases", times, same, "weights and moments are the same bits; the first time, when "
                 f"memory is pinned, {first[0]:.2f} s out, {first[1]:.2f} s back; then an update is made")
    if place.gpu:
        due = 8 * sum(p.numel() for p in learner.engine.module.parameters() if p.requires_grad)
        yield judged("memory between phases", f"{freed / GIB:.2f} GiB freed", freed >= 0.95 * due,
                     f"the two moments have {due / GIB:.2f} GiB")


def seconds_of_one(call: object) -> float:
    assert callable(call)
    began = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Of names and bytes."""
    whole = xxhash.xxh3_128()
    for name in sorted(tensors):
        whole.update(name.encode())
        whole.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return whole.hexdigest()


def apart(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Norm of the difference of all tensors over the norm of what is expected.

    Raises:
        KeyError: they have other names.
    """
    off = sum(float((found[name].double() - tensor.double()).square().sum()) for name, tensor in expected.items())
    return float((off / sum(float(tensor.double().square().sum()) for tensor in expected.values())) ** 0.5)


def freed() -> None:
    """What learners that are no longer used leave in cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def gradients(place: Place) -> Iterator[Row]:
    """The gradients of one update in several ways; AdamW's first moment is a tenth of them.

    Layers are not compiled unless it is said, since ZeRO-3 cannot have them so, and compiled ones round differently."""
    size = SMALL if place.gpu else TINY
    bound = 1e-2 if place.gpu else 1e-5
    fields = {"optimizer": OptimizerConfig(grad_clip=0.0), "compile_layers": False}
    again, chunked = {"gradient_checkpointing": True}, Chunks(elements=64 * size.vocabulary)
    plain = Setting(size, fields, Chunks(elements=2**40))
    expected = _gradients(place, plain)
    settings = {
        "the same again": plain,
        "recomputed activations": replace(plain, fields={**fields, **again}),
        "logits in chunks": replace(plain, chunks=chunked),
        "ZeRO-3": Setting(size, {**fields, "zero_stage": 3}),
        "ZeRO-3 with recomputed activations": Setting(size, {**fields, **again, "zero_stage": 3}),
    }
    for name, setting in settings.items():
        off = apart(_gradients(place, setting), expected)
        yield judged(f"gradients: {name}", f"{off:.1e}", off <= bound,
                     f"relative to stage 0 with kept activations and whole logits; at most {bound:g}")
    exact = _gradients(place, replace(plain, fields={**fields, "autocast": "float32"}))
    eager, compiled = (apart(_gradients(place, replace(plain, fields={**fields, "compile_layers": compiles})), exact)
                       for compiles in (False, True))
    yield judged("gradients: compiled layers", f"{compiled:.1e} from those in float32",
                 compiled <= max(NO_FARTHER * eager, bound),
                 f"layers as they are: {eager:.1e}; at most {NO_FARTHER:g} times as far")


def _gradients(place: Place, setting: Setting) -> dict[str, Tensor]:
    learner = setting.start(place)
    optimizer_step(learner, experience(setting.size), 1)
    found = {name: tensor for name, tensor in state(learner).items() if name.startswith("exp_avg:")}
    del learner
    freed()
    return found


def resume(place: Place) -> Iterator[Row]:
    """Checkpoints of ZeRO-0 and ZeRO-3, loaded at both, and the update after."""
    size, saved, after = SMALL if place.gpu else TINY, {}, {}
    rows = experience(size)
    for stage in (0, 3):
        learner = Setting(size, {"zero_stage": stage}).start(place)
        optimizer_step(learner, rows, 1)
        _save(learner, place.directory / str(stage))
        saved[stage] = digest(state(learner)), torch.get_rng_state(), learner.engine.optimizer_steps
        optimizer_step(learner, rows, 2)
        after[stage] = state(learner)
        del learner
        freed()
    for stage in (0, 3):
        learner = Setting(size, {"zero_stage": stage}).start(place)
        for origin in (3 - stage, stage):
            learner.load(str(place.directory / str(origin)))
            known, random, steps = saved[origin]
            same = (digest(state(learner)) == known and torch.equal(torch.get_rng_state(), random)
                    and learner.engine.optimizer_steps == steps)
            yield judged(f"resume at ZeRO-{stage} from ZeRO-{origin}", "the same bits" if same else "other bits", same,
                         "weights, moments, counters, random numbers")
        optimizer_step(learner, rows, 2)
        found = state(learner)
        equal, off = digest(found) == digest(after[stage]), apart(found, after[stage])
        what, note = f"the next update at ZeRO-{stage}", f"differs by {off:.1e}, relative"
        # Backward passes of attention on GPUs add in any order.
        yield Row(what, "the same bits" if equal else note) if place.gpu else judged(what, note, equal)
        del learner
        freed()


def _save(learner: RandomPolicy, directory: Path) -> None:
    learner.begin_save(str(directory))
    end = time.monotonic() + SAVE_S
    while not learner.save_progress().done:
        if time.monotonic() > end:
            raise TimeoutError(f"a checkpoint was not written within {SAVE_S:g} s")
        time.sleep(0.05)


def roles(place: Place) -> Iterator[Row]:
    """A model's files, as the policy, its reference and its critic load and compute with them."""
    size, timed = (SMALL, 3) if place.gpu else (TINY, 1)
    setting, rows = Setting(size), experience(size)
    model, tensors = setting.files(place)
    policy = PolicyLearner(setting.config(place.gpu), model, 0, 1, SEED, 100, ALGORITHM, 1.0, longest=size.length)
    policy.start(free_address("127.0.0.1"), TIMEOUT_S)
    loaded = dict(policy.engine.module.model.named_parameters())
    wrong = [name for name, tensor in tensors.items() if not torch.equal(tensor.float(), loaded[name].detach().cpu())]
    yield judged("weights from files", f"{len(tensors)} tensors, {len(wrong)} others", not wrong,
                 "in float32, the bits of the files")
    reference = ReferenceScorer(model, size.micro_batch, 1.0, size.length)
    reference.start()
    rollout = rollout_of(rows)
    one, other = policy.logprobs(rollout).values, reference.logprobs([rollout]).values
    off = float(np.abs(one - other)[rows.response_mask].mean())
    yield judged("log-probabilities of policy and reference", f"{off:.1e} nats apart", off <= GAP,
                 f"the mean over response tokens; at most {GAP:g}")
    for name, role in (("policy", policy), ("reference", reference)):
        seconds = seconds_of(partial(role.logprobs, rollout), place.device, timed)
        yield Row(f"speed of the {name}'s log-probabilities", f"{size.rows * size.length / seconds:,.0f} tokens/s")
    del policy, reference
    freed()
    config = CriticConfig.model_validate(setting.config(place.gpu).model_dump(include=set(CriticConfig.model_fields)))
    critic = CriticLearner(config, model, 0, 1, SEED, 100, ALGORITHM, size.length)
    critic.start(free_address("127.0.0.1"), TIMEOUT_S)
    before = critic.values(rollout).values
    targets = replace(rows, values=before, returns=np.where(rows.response_mask, 1, 0).astype(np.float32))
    losses = [critic.update(step, targets).metrics["loss"] for step in range(1, 9)]
    after = critic.values(rollout).values
    yield judged("updates of the critic", f"loss {losses[0]:.3f}, then {losses[-1]:.3f}", losses[-1] < losses[0],
                 "eight updates towards values of 1")
    yield judged("precision of its values", f"{len(np.unique(after[rows.response_mask])):,} distinct ones",
                 len(np.unique(after[rows.response_mask])) > rows.response_mask.sum() / 2,
                 f"of {int(rows.response_mask.sum()):,}; bfloat16 would have a few hundred")


def cpu_adam(place: Place) -> Iterator[Row]:
    """Two updates by DeepSpeed's CPU Adam, against torch's AdamW."""
    _compile_apart()
    # With such an eps a step is about its gradient, and nothing is divided by a small number.
    optimizer = OptimizerConfig(learning_rate=0.1, eps=1.0, grad_clip=0.0)
    size, bound = SMALL if place.gpu else TINY, 2e-2 if place.gpu else 1e-4
    usual = Setting(size, {"optimizer": optimizer})
    moved = Setting(size, {"optimizer": optimizer, "zero_stage": 1, "offload_optimizer": True, "gpus": 1.0})
    (expected, usual_s), (found, moved_s) = (_change(place, setting) for setting in (usual, moved))
    off = apart(found, expected)
    yield judged("steps of CPU Adam", f"{off:.1e}", off <= bound, f"relative to AdamW's; at most {bound:g}")
    yield Row("its update", f"{moved_s:.2f} s", f"{usual_s:.2f} s with AdamW")


def _compile_apart() -> None:
    """Let torch compile in a folder of this check: a compilation that is killed leaves a lock, for which later ones
    would wait."""
    folder = ROOT / "benchmarks" / ".cache" / f"torch_extensions-{platform.python_version()}-{torch.__version__}"
    for lock in folder.glob("*/lock"):
        lock.unlink()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)


def _change(place: Place, setting: Setting) -> tuple[dict[str, Tensor], float]:
    """What two updates change in the weights, and seconds of the second."""
    learner, rows = setting.start(place), experience(setting.size)
    before = _weights(learner)
    optimizer_step(learner, rows, 1)
    seconds = optimizer_step(learner, rows, 2)
    after = _weights(learner)
    del learner
    freed()
    return {name: after[name] - tensor for name, tensor in before.items()}, seconds


def _weights(learner: RandomPolicy) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state(learner).items() if name.startswith("weights:")}
