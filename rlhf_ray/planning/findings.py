"""What of a plan cannot work or is tight, and which field to change."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from rlhf_ray.config.derived import derive, open_episodes, over_context, training_sample
from rlhf_ray.config.generation import BUCKETS_IN_STORE, GenerationConfig
from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.config.settled import is_set
from rlhf_ray.config.stages import EvaluateConfig, PPOConfig, PreferencesStageConfig, StageConfig
from rlhf_ray.planning.device_memory import Load
from rlhf_ray.planning.hardware import GPUS, H100
from rlhf_ray.planning.inference_memory import cache_sequences
from rlhf_ray.planning.memory_breakdown import MIB, Memory, gib
from rlhf_ray.planning.node_spec import Node
from rlhf_ray.planning.publication_size import bucket_bytes
from rlhf_ray.planning.roles import Role
from rlhf_ray.planning.worker_placement import Placement

TIGHT = 0.9
"""Share of a device above which a plan is tight: figures are estimates, and memory is lost to fragmentation."""


@dataclass(frozen=True)
class Finding:
    """One problem of a plan."""

    level: Literal["refused", "tight", "idle", "assumed"]
    text: str


def find_problems(
    config: StageConfig, roles: Sequence[Role], memory: dict[str, Memory], loads: Sequence[Load],
    disk_bytes: float, free_disk: float | None,
) -> Iterator[Finding]:
    """All findings except placement and devices that are too full (`plan.py`)."""
    yield from _sequences(config, roles, memory)
    yield from _open_episodes(config, roles, memory)
    seen: set[tuple[object, ...]] = set()
    for load in sorted(loads, key=lambda one: -one.share):
        alike = (load.kind, round(load.bytes), load.capacity)
        if TIGHT < load.share <= 1 and alike not in seen:
            seen.add(alike)
            role, parts = next(iter(load.roles.items()))
            yield Finding("tight", f"{role} nearly fills {load.name}: {load.share:.0%} at the peak "
                                   f"({gib(load.bytes)} of {gib(load.capacity)}, of which {role} holds "
                                   f"{gib(sum(parts.values()))}); figures are estimates, so leave a tenth free")
    yield from _precision(roles)
    yield from _recomputation(roles)
    yield from _store(config, roles, loads)
    if free_disk is not None and disk_bytes > free_disk:
        yield Finding("refused", f"run.dir={config.run.dir} has {gib(free_disk)} free, and the run writes "
                                 f"{gib(disk_bytes)}; lower checkpoint.keep, or set run.dir to a larger disk")


def idle_gpus(config: StageConfig, placement: Placement, nodes: Sequence[Node]) -> str:
    """A sentence about GPUs that no worker uses, without those that other jobs have reserved; empty if there are
    none."""
    free = sum(node.gpus_free for node in nodes)
    used = len({(worker.node, device) for worker in placement.workers for device in worker.devices})
    if used >= free or placement.shortages:
        return ""
    on_cpus = "every role is on CPUs" if not used else "no role uses them"
    fix = ("leave pools, and the workers and gpus of roles, out of the configuration, and the run places its roles on "
           "all GPUs" if is_set(config, "pools") else
           "set pools, and the workers and gpus of roles" if not config.cluster.derived else
           "raise the workers of a role, or leave them out")
    return f"{free - used} of {free} GPUs are idle: {on_cpus}; {fix}"


def unknown_gpus(nodes: Sequence[Node]) -> Iterator[Finding]:
    """What is assumed about GPUs that are not in `hardware.GPUS`."""
    known = {gpu.name for gpu in GPUS.values()}
    for name in dict.fromkeys(node.gpu.name for node in nodes if node.gpu and node.gpu.name not in known):
        yield Finding("assumed", f"{name} is none of the GPUs with known figures ({', '.join(GPUS)}): it is planned "
                                 f"with its own memory and with the rates of an {H100.name}, so times are a guess")
    if unnamed := [node.name for node in nodes if node.gpus and node.gpu is None]:
        yield Finding("assumed", f"the GPUs of {', '.join(unnamed)} are of a kind without known figures "
                                 f"({', '.join(GPUS)}), whose memory is not known either: plan with --nodes for one of "
                                 "about the same size")


def _sequences(config: StageConfig, roles: Sequence[Role], memory: dict[str, Memory]) -> Iterator[Finding]:
    """A model has a longest sequence. vLLM does not start if its cache cannot hold one of maximum length, and preempts
    sequences if it cannot hold all."""
    for role in roles:
        generator = role.placement
        if not isinstance(generator, GenerationConfig):
            continue
        sample = derive(config) if isinstance(config, PPOConfig) else cast(PreferencesStageConfig, config)
        longest = sample.longest_sample
        shape = role.models[0]
        if shape.context is not None and longest > shape.context:
            yield Finding("refused", over_context(longest, sample.longest_sample_field, role.named, shape.context))
        room = cache_sequences(generator, shape, memory[role.name], longest)
        needed = -(-shape.cache_bytes * longest // MIB)
        if room < 1:
            fix = (f"set generator.kv_cache_mb to {needed} at least" if generator.cache_mb else
                   "raise generator.gpu_memory_utilization or generator.tensor_parallel, or use larger GPUs")
            yield Finding("refused", f"generator: its KV cache holds {max(room, 0):.2g} of one sequence of {longest} "
                                     f"tokens, which needs {needed} MiB, so vLLM would not start; {fix}")
        elif room < generator.max_sequences / 2:
            all_of_them = -(-shape.cache_bytes * longest * generator.max_sequences // MIB)
            more = (f"raise generator.kv_cache_mb ({all_of_them} holds all)" if generator.cache_mb else
                    "use more tensor_parallel")
            yield Finding("tight", f"generator: its KV cache holds {room:.0f} longest sequences of "
                                   f"generator.max_sequences={generator.max_sequences}; vLLM preempts the others; "
                                   f"lower generator.max_sequences to {int(room)}, or {more}")


def _open_episodes(config: StageConfig, roles: Sequence[Role], memory: dict[str, Memory]) -> Iterator[Finding]:
    """Between two turns, an episode's tokens stay in the KV cache as long as nothing else needs their place."""
    if not isinstance(config, PPOConfig) or not config.environments:
        return
    [role] = [role for role in roles if role.name == "generator"]
    assert isinstance(role.placement, GenerationConfig)
    longest, field = training_sample(config)
    room = cache_sequences(role.placement, role.models[0], memory[role.name], longest)
    opened = open_episodes(config) / config.generator.workers
    if 1 <= room < opened / 2:
        most = max(1, int(room * config.generator.workers / config.episode_runner.workers / len(config.environments)))
        more = "raise generator.kv_cache_mb" if role.placement.cache_mb else "use more generator.workers"
        yield Finding("tight", f"generator: its KV cache holds {room:.0f} episodes of {field}={longest} tokens, and "
                               f"{opened:.0f} may be open at each generator; between turns it drops the others' "
                               "tokens, and computes them again; lower environments.NAME.concurrency to "
                               f"{most}, or {more}")


def _store(config: StageConfig, roles: Sequence[Role], loads: Sequence[Load]) -> Iterator[Finding]:
    """The object store holds three buckets of a publication at a time."""
    if not isinstance(config, PPOConfig) or isinstance(config, EvaluateConfig):
        return
    if config.weights.transport != "object_store":
        return
    shape = roles[0].models[0]
    bucket = bucket_bytes(config, shape)
    held = BUCKETS_IN_STORE * bucket
    needed = held + (config.buffer.capacity_mb or 0) * MIB
    stores = [load.holders["object store"]["object store"] for load in loads if load.device is None]
    if stores and min(stores) < needed:
        yield Finding("tight", f"the object store of {gib(min(stores))} may not hold three buckets of a publication "
                               f"(the largest is {gib(bucket)}) besides the buffer, and Ray would spill to disk; set "
                               f"cluster.object_store_mb to {-(-int(2 * held) // MIB)} (`ray start "
                               "--object-store-memory` on a cluster of your own)")


def _recomputation(roles: Sequence[Role]) -> Iterator[Finding]:
    """A share of a few layers may be none or all of them."""
    for role in roles:
        place = role.placement
        if not isinstance(place, LearnerConfig) or not 0 < place.gradient_checkpointing < 1:
            continue
        share = place.gradient_checkpointing
        layers = role.models[0].layers
        recomputed = place.recomputed(layers)
        if recomputed in (0, layers):
            result, value = ("none", "false") if recomputed == 0 else ("all", "true")
            yield Finding("tight", f"{role.name}.gradient_checkpointing={share:g} recomputes {result} of {layers} "
                                   f"layers; set it to {value}, or to a multiple of 1/{layers}")


def _precision(roles: Sequence[Role]) -> Iterator[Finding]:
    for role in roles:
        place = role.placement
        if place.gpus and isinstance(place, LearnerConfig) and place.autocast == "float32":
            yield Finding("tight", f"{role.name}.autocast=float32 computes at about a fifteenth of the GPU's peak; set "
                                   "bfloat16 (weights and optimizer stay in float32)")
        elif place.gpus and not isinstance(place, LearnerConfig) and any(s.bytes_per_value == 4 for s in role.models):
            field = "rewards.NAME.dtype" if role.name == "reward" else "model.dtype"
            yield Finding("tight", f"{role.name} holds its model in float32 on a GPU, which takes twice the memory and "
                                   f"computes far slower; set {field} to bfloat16")
