"""Suggests changes of configuration fields that make a plan fit.

Changes are tried in order of cost, the cheapest first, each on top of those before. The first combination that fits is
suggested, without the changes that are not needed.
"""

from collections.abc import Callable, Iterator
from typing import Any

from rlhf_ray.config.derived import longest_row
from rlhf_ray.config.generation import BUCKET_BETWEEN_GPUS_MB, CACHE_ON_CPU_MB, GenerationConfig
from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.config.stages import PPOConfig, ScorerConfig, StageConfig
from rlhf_ray.planning.device_memory import Load

Change = tuple[str, str, Any]
"""A section, a field in it, and a value."""
Fullness = Callable[[StageConfig], float]
"""How full a device would be with this configuration; 1 is full."""


SHARES: tuple[float, ...] = (False, 0.25, 0.5, 0.75, True)
"""Shares of layers to recompute (`gradient_checkpointing`) that are tried."""


def suggest_change(config: StageConfig, load: Load, fullness: Fullness) -> str:
    """A sentence that names the fields to change and their values."""
    chosen: list[Change] = []
    for change in changes(config, load):
        chosen.append(change)
        if fullness(changed(config, chosen)) <= 1:
            needed = minimal_changes(config, chosen, fullness)
            return "To fit, set " + ", ".join(f"{s}.{f}={_shown(v)}" for s, f, v in needed)
    if load.device is None:
        return "No single change of the configuration makes it fit: use nodes with more memory, or a smaller model"
    role = next(iter(load.roles))
    section = getattr(config, role, None)
    more = (f"{role}.tensor_parallel" if isinstance(section, GenerationConfig) else
            f"{role}.workers, {role}.shards" if isinstance(section, ScorerConfig) else f"{role}.workers")
    freed = ""
    if isinstance(section, LearnerConfig) and section.compile_layers:
        freed = f"leave out {role}.compile_layers, which rules out zero_stage=3, "
    return (f"No change of the memory-saving fields makes it fit: {freed}use more GPUs ({more} and pools), larger "
            "GPUs, or a smaller model")


def changes(config: StageConfig, load: Load) -> Iterator[Change]:
    """Changes to try for the roles that share the device, the cheapest first."""
    names = {holder.partition("/")[0] for holder in load.holders}
    sections = {name: getattr(config, name) for name in names if hasattr(config, name)}
    learners = {name: s for name, s in sections.items() if isinstance(s, LearnerConfig)}
    for name, section in learners.items():
        if section.gpus and section.autocast != "bfloat16":
            yield name, "autocast", "bfloat16"
    for share in SHARES[1:]:
        for name, section in learners.items():
            if section.gradient_checkpointing < share:
                yield name, "gradient_checkpointing", share
    for name, section in learners.items():
        for budget in _halvings(section.micro_batch_tokens, longest_row(config)):
            yield name, "micro_batch_tokens", budget
    if isinstance(config, PPOConfig) and (config.weights.bucket_mb or 0) > BUCKET_BETWEEN_GPUS_MB:
        yield "weights", "bucket_mb", BUCKET_BETWEEN_GPUS_MB
    for name, section in learners.items():
        if section.workers > 1 and section.zero_stage < 3:
            if section.compile_layers:
                yield name, "compile_layers", False
            yield name, "zero_stage", 3
    for name, section in learners.items():
        if section.gpus and not section.offload_optimizer and section.workers > 1:
            yield name, "offload_optimizer", True
    for name, section in sections.items():
        if isinstance(section, ScorerConfig):
            for shards in range(section.shards + 1, section.workers + 1):
                if section.workers % shards == 0:
                    yield name, "shards", shards
            for budget in _halvings(section.micro_batch_tokens, longest_row(config)):
                yield name, "micro_batch_tokens", budget
        if isinstance(section, GenerationConfig) and section.cache_mb is None and learners:
            for share in (0.6, 0.45, 0.3):
                yield name, "gpu_memory_utilization", share
        if isinstance(section, GenerationConfig) and section.cache_mb:
            for size in _halvings(section.cache_mb, CACHE_ON_CPU_MB):
                yield name, "kv_cache_mb", size
    if load.device is None and not config.cluster.address:
        for size in _halvings(config.cluster.object_store_mb, 200):
            yield "cluster", "object_store_mb", size


def changed(config: StageConfig, chosen: list[Change]) -> StageConfig:
    """The configuration with these values, not validated: it is only used for planning."""
    update: dict[str, Any] = {}
    for section, field, value in chosen:
        before = update.get(section, getattr(config, section))
        update[section] = before.model_copy(update={field: value})
    return config.model_copy(update=update)


def minimal_changes(config: StageConfig, chosen: list[Change], fullness: Fullness) -> list[Change]:
    """The changes that are needed, each field once, with its last value."""
    last = {(section, field): value for section, field, value in chosen}
    kept = [(section, field, value) for (section, field), value in last.items()]
    for change in list(kept):
        fewer = [other for other in kept if other != change]
        if fewer and fullness(changed(config, fewer)) <= 1:
            kept = fewer
    return kept


def _halvings(amount: int, least: int) -> Iterator[int]:
    """`amount` halved repeatedly, down to `least`."""
    while amount > least:
        amount = max(least, amount // 2)
        yield amount


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
