"""Settings for GPUs that nobody made: which roles run on which GPUs, in what precision, with what batches.

Some layouts are made by simple rules, and the plan's own figures choose: of those that fit into the GPUs' memory, the
one with the shortest step. What somebody set is never changed; layouts that contradict it are left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any, TypeVar

from pydantic import ValidationError

from rlhf_ray.config.combination_checks import check_pools, experience_bytes_per_token
from rlhf_ray.config.derived import longest_row, placements_of, training_sample, transport_of, unset_micro_batches
from rlhf_ray.config.generation import BUCKET_FROM_GPU_MB, BUCKETS_IN_STORE, GenerationConfig
from rlhf_ray.config.learner import MICRO_BATCH_TOKENS, LearnerConfig
from rlhf_ray.config.load import resolve
from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.config.rewards import ModelReward, ProcessReward
from rlhf_ray.config.run import PoolConfig
from rlhf_ray.config.settled import is_set, with_derived, without_derived
from rlhf_ray.config.stages import PPOConfig, ScorerConfig, StageConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.planning.config_suggestions import SHARES
from rlhf_ray.planning.device_memory import loads_of, worker_memories
from rlhf_ray.planning.findings import TIGHT, find_problems
from rlhf_ray.planning.hardware import Hardware
from rlhf_ray.planning.inference_memory import cache_sequences
from rlhf_ray.planning.memory_breakdown import MIB
from rlhf_ray.planning.model_shape import ModelShape
from rlhf_ray.planning.node_spec import Node
from rlhf_ray.planning.roles import Role, Shapes, roles_of
from rlhf_ray.planning.step_time import estimate_step_time
from rlhf_ray.planning.worker_placement import place

C = TypeVar("C", bound=StageConfig)
Values = dict[str, Any]
"""Values by dotted path."""

USUAL_WIDTH = 4096
"""Hidden size of the 7B and 8B models that default learning rates are for."""
HELD = 0.5
"""Share of a GPU that a frozen model's or an engine's weights may take before they are divided among several."""
SHARED_CACHE = 0.88
"""Share of a GPU up to which the KV cache of a generator fills it beside other roles."""
LARGEST_MICRO_BATCH = 32768
"""Tokens of a micro-batch beyond which weights are read seldom enough."""
WAYS: tuple[tuple[int, float, int], ...] = (
    *((stage, *way) for stage in (1, 3) for way in (
        (False, LARGEST_MICRO_BATCH), (False, 16384), *((share, 8192) for share in SHARES[:-1]), (True, 16384),
        (True, 8192))),
    (3, True, 4096), (3, True, 0))
"""Ways to train, the fastest first: ZeRO stage, the share of layers that are recomputed, and tokens of a micro-batch
(at least the longest row). From 8,192 tokens on, twice as many save less time than a quarter of the layers takes again.
Stage 3 gathers the weights in each pass; shorter micro-batches gather more often."""
LAST_RESORTS = ("sleep_level", "offload_optimizer")
"""Fields that are derived only where nothing else fits: moving weights and state takes time that no plan counts."""
REASONS = {
    "pools": "of the layouts that fit into the GPUs' memory, the one with the shortest planned step",
    "dtype": "half the memory, and the precision in which GPUs are fast",
    "autocast": "float32 products run at a fifteenth of the rate; weights and optimizer stay in float32",
    "zero_stage": "the lowest of 1 and 3 that fits",
    "gradient_checkpointing": "the fewest quarters of the layers with which activations fit",
    "micro_batch_tokens": "the largest that fits, up to 32768",
    "learning_rate": "the default times 4096 / hidden size (Yang et al. 2022, table 3)",
    "object_store_mb": "three buckets of a publication besides the experience, twice",
    "transport": "of `auto`: between GPUs where the placement allows it",
    "tensor_parallel": "the fewest GPUs of which weights take half",
    "shards": "the fewest GPUs of which weights take half",
    "kv_cache_mb": "what the other roles leave of the GPU, or what all sequences need",
    "max_sequences": "as many of the longest as the KV cache holds, up to 256",
    "chunk": "whole groups, up to 32 samples, and work for every generator",
    "sleep_level": "generators and learners take turns on a GPU that cannot hold both",
    "offload_optimizer": "AdamW's state has no room on the GPUs in this layout",
    "offload_between_phases": "generators and learners take turns on a GPU that cannot hold both",
}
"""Why a derived value is what it is, by the last part of the field's name."""
KEPT = ("learning_rate", "dtype", "autocast")
"""Fields that any machine can give, and on which the result of training depends: a resume keeps them."""


def learning_rate(usual: float, shape: ModelShape) -> float:
    """A learning rate for a model of this width, to one digit.

    The rates that papers and libraries report are for 7B and 8B models (hidden size 4096). With Adam, the best rate of
    hidden weights is inversely proportional to their width (Yang et al. 2022, "Tensor Programs V", arXiv:2203.03466,
    table 3); the models of Brown et al. 2020 (GPT-3, table 2.1) follow about the same: 6e-4 at a width of 768, 0.6e-4
    at 12288. So 1e-6 becomes 5e-6 for half a billion weights (896) and 5e-7 for 70 billion (8192).
    """
    return float(f"{usual * USUAL_WIDTH / shape.hidden:.1g}")


@dataclass(frozen=True)
class Machines:
    """The GPUs that a run may use."""

    nodes: tuple[Node, ...]
    """Nodes with GPUs of a known kind."""
    gpus: int
    per_node: int
    """Of the node with the fewest."""
    device: Hardware
    """The GPU with the least memory."""
    cpus: float
    """Logical CPUs for each GPU."""


def machines_of(nodes: Sequence[Node]) -> Machines | None:
    """The GPUs of these nodes that no other job has reserved (all of them, if others have reserved all); None if there
    are none, or of unknown kinds only."""
    known = [node for node in nodes if node.gpus and node.gpu]
    free = [(node, node.gpus_free) for node in known if node.gpus_free] or [(node, node.gpus) for node in known]
    if not free:
        return None
    devices = [node.gpu for node, _ in free if node.gpu]
    return Machines(tuple(node for node, _ in free), sum(count for _, count in free), min(n for _, n in free),
                    min(devices, key=lambda gpu: gpu.memory_bytes), min(node.cpus / node.gpus for node, _ in free))


def derive_gpu_settings(config: C, nodes: Sequence[Node], shapes: Shapes) -> C:
    """The configuration with derived values of all that nobody set, for the GPUs of these nodes; `cluster.derived`
    names them. Unchanged if there are no GPUs. Who names `pools` places the roles: then only the learners'
    `micro_batch_tokens` are derived. Values that were derived for other machines are derived again, but for those in
    `KEPT`.

    Raises:
        ConfigError: no layout goes with what is set.
        ModelError: as `Shapes`.
    """
    machines = machines_of(nodes)
    if is_set(config, "pools"):
        return config if machines is None else _with_micro_batches(config, nodes, shapes)
    if machines is None:
        return checked(without_placement(config)) if "pools" in config.cluster.derived else config
    base = _with_precision(without_placement(config))
    best: tuple[C, float, float] | None = None
    refused = ""
    for layout in _layouts(base, machines, shapes):
        try:
            found = _filled(base, layout, machines, nodes, shapes)
        except ConfigError as error:
            refused = refused or str(error).splitlines()[-1].strip()
            continue
        if best is None or _order(*found[1:]) < _order(*best[1:]):
            best = found
    if best is None:
        set_here = ", ".join(f"{path}={value:g}" for path, value in _set_placement(base)) or "the configuration"
        raise ConfigError(f"no layout of the roles on {machines.gpus} x {machines.device.name} goes with {set_here}"
                          f": {refused or 'they are too few'}; change it, or place the roles yourself with pools")
    return best[0]


def _with_micro_batches(config: C, nodes: Sequence[Node], shapes: Shapes) -> C:
    """The configuration with the largest micro-batches of learners on GPUs that memory suffices for, where nobody set
    them: powers of two, and at least the longest row. `MICRO_BATCH_TOKENS` and fewer may leave no memory to spare, and
    are the most on GPUs of an unknown kind."""
    unset = unset_micro_batches(config)
    least = longest_row(config) if unset else 0
    tokens = {path: max(LARGEST_MICRO_BATCH, least) for path in unset}
    while tokens:
        found = with_derived(config, tokens)
        roles = roles_of(found, shapes)
        placement = place(found.pools, {role.name: role.placement for role in roles}, nodes)
        if placement.shortages:
            return config
        share = {path: max(load.share for load in loads_of(found.cluster, roles, placement, nodes)
                           if load.device is not None and path.partition(".")[0] in load.roles) for path in tokens}
        larger = {path: size for path, size in tokens.items() if size > least and (
                  share[path] > TIGHT if size > MICRO_BATCH_TOKENS else 1 < share[path] < inf)}
        if not larger:
            return found
        most = max(larger.values())
        tokens |= {path: max(least, size // 2) for path, size in larger.items() if size == most}
    return config


def fits(config: StageConfig, nodes: Sequence[Node], shapes: Shapes) -> bool:
    """Whether a configuration can be placed on these nodes and their memory."""
    return _evaluated(config, nodes, shapes)[0] <= 1


def machine_fields(config: StageConfig) -> list[str]:
    """The derived fields that depend on the machines, and that results depend on by rounding only."""
    return [path for path in config.cluster.derived if path.rpartition(".")[2] not in KEPT]


def without_placement(config: C) -> C:
    """The configuration without what an earlier derivation filled in for machines, and without what `resolve` fills in
    by the placement. A transport that was derived is `auto` by somebody's wish: nobody's is the default, main memory,
    which has been tested."""
    asked = {"weights.transport": "auto"} if "weights.transport" in config.cluster.derived else {}
    present = [path for path in ("generator.kv_cache_mb", "buffer.capacity_mb", "weights.bucket_mb")
               if path.partition(".")[0] in type(config).model_fields]
    return with_derived(without_derived(config, [*machine_fields(config), *present]), asked)


def _with_precision(config: C) -> C:
    """bfloat16 for all models, since sizes depend on it."""
    values: Values = {f"{name}.dtype": "bfloat16" for name in type(config).model_fields
                      if isinstance(getattr(config, name), ModelConfig | NewModelConfig)}
    values |= {f"rewards.{name}.dtype": "bfloat16" for name, reward in getattr(config, "rewards", {}).items()
               if isinstance(reward, ModelReward | ProcessReward)}
    return with_derived(config, {path: value for path, value in values.items() if path not in config.cluster.derived})


@dataclass(frozen=True)
class Group:
    """Roles that share the bundles of one pool."""

    pool: str
    roles: tuple[str, ...]
    bundles: int
    gpus: int = 1
    """GPUs of a bundle."""
    shards: int = 1
    """Of a scorer whose model is divided."""


def _on_gpus(config: StageConfig, role: Role) -> bool:
    """Whether the role holds a model, and nobody placed it on CPUs."""
    return bool(role.models) and not (is_set(config, f"{role.name}.gpus") and not role.placement.gpus)


def _divided(role: Role, machines: Machines, most: int) -> int:
    """The fewest GPUs, a power of two up to `most`, of which the weights of a role take a part of `HELD`."""
    weights = sum(shape.weight_bytes for shape in role.models)
    number = 1
    while weights / number > HELD * machines.device.memory_bytes and 2 * number <= most:
        number *= 2
    return number


def _layouts(config: StageConfig, machines: Machines, shapes: Shapes) -> Iterator[list[Group]]:
    """Layouts to choose from: all roles on every GPU, or pools of generators, scorers and learners."""
    roles = [role for role in roles_of(config, shapes) if _on_gpus(config, role)]
    generators = [role for role in roles if isinstance(role.placement, GenerationConfig)]
    learners = [role for role in roles if isinstance(role.placement, LearnerConfig)]
    scorers = [role for role in roles if isinstance(role.placement, ScorerConfig)]
    names = tuple(role.name for role in roles)
    wide = max((_engine_gpus(config, role, machines) for role in generators), default=1)
    shards = {role.name: _shards(role, config, machines) for role in scorers}
    if len(roles) == 1:
        yield [Group("default", names, max(1, machines.gpus // wide), wide)]
        return
    if wide == 1 and max(shards.values(), default=1) == 1:
        yield [Group("default", names, machines.gpus)]
    for scoring in _scoring_pools(scorers, shards, machines):
        judges = sum(group.bundles for group in scoring)
        for generating in _generator_bundles(config, machines, wide) if generators else [0]:
            left = machines.gpus - judges - generating * wide
            for trained in _learner_pools(config, learners, left):
                engines = [Group("generation", (generators[0].name,), generating, wide)] if generators else []
                yield [*engines, *scoring, *trained]


def _engine_gpus(config: StageConfig, role: Role, machines: Machines) -> int:
    generator = role.placement
    assert isinstance(generator, GenerationConfig)
    given = any(is_set(config, f"generator.{field}") for field in ("tensor_parallel", "pipeline_parallel"))
    return generator.devices if given else _divided(role, machines, machines.per_node)


def _shards(role: Role, config: StageConfig, machines: Machines) -> int:
    given = role.placement
    assert isinstance(given, ScorerConfig)
    return given.shards if is_set(config, f"{role.name}.shards") else _divided(role, machines, machines.gpus)


def _scoring_pools(scorers: Sequence[Role], shards: Mapping[str, int], machines: Machines) -> Iterator[list[Group]]:
    """Pools of the frozen models: whole models share GPUs if their weights fit on one; divided ones have their own."""
    if not scorers:
        yield []
        return
    weights = sum(shape.weight_bytes for role in scorers for shape in role.models)
    together = max(shards.values()) == 1 and weights <= HELD * machines.device.memory_bytes
    copies = sorted({1, *(max(1, round(machines.gpus * part)) for part in (1 / 8, 1 / 4, 3 / 8))})
    if together:
        for count in copies:
            yield [Group("scoring", tuple(role.name for role in scorers), count)]
        return
    flops = {role.name: sum(shape.active for shape in role.models) for role in scorers}
    for count in copies:
        parts = {role.name: count * flops[role.name] / max(flops.values()) for role in scorers}
        yield [Group(role.name, (role.name,), shards[role.name] * max(1, round(parts[role.name] / shards[role.name])),
                     shards=shards[role.name]) for role in scorers]


def _generator_bundles(config: StageConfig, machines: Machines, wide: int) -> list[int]:
    if is_set(config, "generator.workers"):
        return [config.generator.workers]  # type: ignore[attr-defined]
    parts = {max(1, round(machines.gpus * eighths / 8 / wide)) for eighths in range(1, 7)}
    return sorted(parts)


def _learner_pools(config: StageConfig, learners: Sequence[Role], gpus: int) -> Iterator[list[Group]]:
    """The learners' GPUs, divided by their numbers of weights."""
    if gpus < len(learners):
        return
    if not learners:
        yield []
        return
    if len(learners) == 1:
        yield [Group(learners[0].name, (learners[0].name,), gpus)]
        return
    policy, critic = learners
    share = critic.models[0].active / (critic.models[0].active + policy.models[0].active)
    if is_set(config, "policy.workers"):
        share = 1 - policy.placement.workers / gpus
    elif is_set(config, "critic.workers"):
        share = critic.placement.workers / gpus
    for part in sorted({ceil(gpus * share - 0.01), int(gpus * share + 0.01)}):
        critics = min(gpus - 1, max(1, part))
        yield [Group("policy", ("policy",), gpus - critics), Group("critic", ("critic",), critics)]


def _filled(base: C, layout: Sequence[Group], machines: Machines, nodes: Sequence[Node], shapes: Shapes
            ) -> tuple[C, float, float]:
    """A layout with its batches, the share of its fullest device, and the seconds of a step.

    Raises:
        ConfigError: it does not go with what is set.
    """
    placed = _placed(base, layout, machines)
    try:
        check_pools(placed)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    config = _with_sizes(placed, machines, nodes, shapes)
    shared = len(layout) == 1 and len(layout[0].roles) > 1
    ways = _shared_ways if shared else _own_ways
    best: tuple[C, float, float] | None = None
    for way in ways(config, machines, shapes):
        if best is not None and best[1] <= TIGHT and any(path.endswith(LAST_RESORTS) for path in way):
            break
        found = with_derived(config, way)
        if shared and hasattr(found, "generator"):
            found = _with_shared_cache(found, machines, nodes, shapes)
        elif hasattr(found, "generator"):
            found = _with_all_sequences(found, machines, nodes, shapes)
        found = checked(found)
        share, seconds = _evaluated(found, nodes, shapes)
        if best is None or _order(share, seconds) < _order(*best[1:]):
            best = found, share, seconds
    assert best is not None
    return best


def _order(share: float, seconds: float) -> tuple[bool, float]:
    """What fits comes first, the fastest of it; else the least full."""
    return share > TIGHT, seconds if share <= TIGHT else share


def _placed(base: C, layout: Sequence[Group], machines: Machines) -> C:
    """The configuration with pools and places of all roles."""
    placements = placements_of(base)
    rows = _rows(base)
    homes = {role: group for group in layout for role in group.roles}
    other = next((group for group in layout if "reference" in group.roles or "reward" in group.roles), layout[-1])
    values: Values = {}
    for role, placement in placements.items():
        group = homes.get(role)
        values[f"{role}.pool"] = (group or other).pool
        if group is None:
            continue
        each = group.gpus if len(group.roles) == 1 else int(100 / len(group.roles)) / 100
        values[f"{role}.gpus"] = float(each)
        values[f"{role}.workers"] = min(group.bundles, rows) if isinstance(placement, LearnerConfig) else group.bundles
        if isinstance(placement, LearnerConfig):
            values[f"{role}.autocast"] = "bfloat16"
        if isinstance(placement, GenerationConfig) and group.gpus > 1:
            values["generator.tensor_parallel"] = group.gpus
        if isinstance(placement, ScorerConfig):
            values[f"{role}.micro_batch_tokens"] = max(16384, longest_row(base))
            if group.shards > 1:
                values[f"{role}.shards"] = group.shards
    kept = {path: value for path, value in values.items() if path.rpartition(".")[2] not in KEPT
            or path not in base.cluster.derived}
    config = with_derived(base, kept)
    pools = {group.pool: PoolConfig(bundles=group.bundles, gpus=group.gpus,
                                    cpus=_bundle_cpus(config, group, machines)) for group in layout}
    return with_derived(config, {"pools": pools})


def _bundle_cpus(config: StageConfig, group: Group, machines: Machines) -> float:
    """Logical CPUs of a bundle: up to 8 for each GPU, and what its workers ask for."""
    usual = group.gpus * (min(8, int(machines.cpus)) if machines.cpus >= 1 else round(0.9 * machines.cpus, 2))
    asked = sum(place.cpus * ceil(place.workers / group.bundles) for place in placements_of(config).values()
                if place.pool == group.pool)
    return float(max(usual, asked))


def _with_sizes(config: C, machines: Machines, nodes: Sequence[Node], shapes: Shapes) -> C:
    """Learning rates, and the sizes of chunks and the object store."""
    values: Values = {}
    for role in roles_of(config, shapes):
        learner, path = role.placement, f"{role.name}.optimizer.learning_rate"
        if isinstance(learner, LearnerConfig) and learner.gpus and path not in config.cluster.derived:
            values[path] = learning_rate(learner.usual_rate, role.models[0])
    if isinstance(config, PPOConfig):
        samples, group = config.coordinator.samples_per_step, config.coordinator.samples_per_prompt
        most = max(group, min(32, samples // config.generator.workers))
        whole = [size for size in range(group, most + 1, group) if samples % size == 0]
        values["generator.chunk"] = max(whole, default=group)
        if config.cluster.address is None:
            values["cluster.object_store_mb"] = _store_mb(config, nodes, shapes)
    return with_derived(config, values)


def _store_mb(config: PPOConfig, nodes: Sequence[Node], shapes: Shapes) -> int:
    """Object store of a local cluster: a power of two that holds three buckets, if they are sent through it (the
    embedding is one at least), and all experience, twice, within 30 % of main memory."""
    shape = shapes(config.model, "model")
    buckets = 0
    if transport_of(config) == "object_store":
        largest = (config.weights.bucket_mb or BUCKET_FROM_GPU_MB) * MIB
        buckets = BUCKETS_IN_STORE * max(largest, shape.vocabulary * shape.hidden * shape.bytes_per_value)
    longest, _ = training_sample(config)
    experience = config.coordinator.samples_ahead * longest * experience_bytes_per_token(config)
    needed = ceil(2 * max(buckets, experience) / MIB)
    size = 512
    while size < needed:
        size *= 2
    return max(512, min(size, int(0.3 * min(node.memory_bytes for node in nodes) / MIB)))


def _rows(config: StageConfig) -> int:
    """Rows of an optimizer step, which ranks divide."""
    if isinstance(config, PPOConfig):
        return max(1, config.coordinator.samples_per_step // config.algorithm.mini_batches)
    return int(config.training.batch_size) if hasattr(config, "training") else 1


def _ways_of(config: StageConfig, learner: str) -> Iterator[Values]:
    """`WAYS` of one learner, those that differ."""
    alone = getattr(config, learner).workers == 1
    for stage, recomputed, tokens in WAYS:
        if stage == 3 and alone:
            if tokens in (4096, 0):
                stage = 1
            else:
                continue
        yield {f"{learner}.zero_stage": stage, f"{learner}.gradient_checkpointing": recomputed,
               f"{learner}.micro_batch_tokens": max(tokens, longest_row(config))}


def _learners(config: StageConfig) -> list[str]:
    return [name for name, place in placements_of(config).items() if isinstance(place, LearnerConfig) and place.gpus]


def _shared_ways(config: C, machines: Machines, shapes: Shapes) -> Iterator[Values]:
    """Ways of all learners on shared GPUs; those in which roles take turns at last."""
    learners = _learners(config)
    ways = [{path: value for each in together for path, value in each.items()}
            for together in zip(*(list(_ways_of(config, name)) for name in learners), strict=False)]
    yield from ways or [{}]
    if not isinstance(config, PPOConfig):
        return
    turns: Values = {}
    if not config.coordinator.max_staleness:
        turns = {"generator.sleep_level": 1 if config.policy.lora else 2}
        offloaded = {f"{name}.offload_between_phases": True for name in learners}
        yield from ({**way, **turns, **offloaded} for way in ways)
    yield from ({**way, **turns, **_in_main_memory(learners)} for way in ways[-2:])


def _in_main_memory(learners: Sequence[str]) -> Values:
    """AdamW's state in main memory, the last resort: DeepSpeed's CPU Adam is slow."""
    return {f"{name}.offload_optimizer": True for name in learners}


def _own_ways(config: C, machines: Machines, shapes: Shapes) -> Iterator[Values]:
    """The first way of each learner that fits into a GPU of its own, or the last one."""
    chosen: Values = {}
    for learner in _learners(config):
        for way in _ways_of(config, learner):
            chosen |= way
            changed = with_derived(config, chosen)
            role = next(role for role in roles_of(changed, shapes) if role.name == learner)
            if role.memory(machines.device).device_bytes <= TIGHT * machines.device.memory_bytes:
                break
    yield chosen
    if learners := _learners(config):
        yield {**chosen, **_in_main_memory(learners)}


def _with_all_sequences(config: C, machines: Machines, nodes: Sequence[Node], shapes: Shapes) -> C:
    """As many sequences at a time as the cache of a whole GPU holds."""
    config = with_derived(config, {"generator.max_sequences": 256})
    generator = next(role for role in roles_of(config, shapes) if role.name == "generator")
    assert isinstance(generator.placement, GenerationConfig)
    room = cache_sequences(generator.placement, generator.models[0], generator.memory(machines.device),
                           longest_row(config))
    return with_derived(config, {"generator.max_sequences": max(8, min(256, int(room / 8) * 8))})


def _with_shared_cache(config: C, machines: Machines, nodes: Sequence[Node], shapes: Shapes) -> C:
    """The KV cache of a generator beside other roles: for all sequences, or what is left of the GPU."""
    assert isinstance(config, PPOConfig)
    generator = next(role for role in roles_of(config, shapes) if role.name == "generator")
    each = generator.models[0].cache_bytes * longest_row(config) / MIB
    wanted = ceil(config.coordinator.samples_per_step / config.generator.workers / 8)
    if is_set(config, "generator.kv_cache_mb"):
        wanted = int((config.generator.kv_cache_mb or 0) / each / 8)
    sequences = min(256, max(8, 8 * wanted))
    while True:
        size = max(8, ceil(sequences * each))
        found = with_derived(config, {"generator.kv_cache_mb": size, "generator.max_sequences": sequences})
        if sequences <= 8 or _gpu_share(found, nodes, shapes) <= SHARED_CACHE:
            return found
        sequences = max(8, int(sequences * 0.75 / 8) * 8)


def _gpu_share(config: StageConfig, nodes: Sequence[Node], shapes: Shapes) -> float:
    roles = roles_of(config, shapes)
    placement = place(config.pools, {role.name: role.placement for role in roles}, nodes)
    return max((load.share for load in loads_of(config.cluster, roles, placement, nodes) if load.device is not None),
               default=0.0)


def _evaluated(config: StageConfig, nodes: Sequence[Node], shapes: Shapes) -> tuple[float, float]:
    """The share of the fullest device (infinite if the run cannot work), and the seconds of a step."""
    roles = roles_of(config, shapes)
    placement = place(config.pools, {role.name: role.placement for role in roles}, nodes)
    if placement.shortages:
        return inf, inf
    loads = loads_of(config.cluster, roles, placement, nodes)
    memory = worker_memories(roles, placement, nodes)
    problems = find_problems(config, roles, memory, loads, 0.0, None)
    if any(problem.level == "refused" for problem in problems):
        return inf, inf
    step = estimate_step_time(config, roles, placement, nodes)
    return max((load.share for load in loads), default=0.0), step.seconds if step else 0.0


def checked(config: C) -> C:
    """The configuration, resolved, if each section of a role is valid by itself, and all go together.

    Raises:
        ConfigError: they do not.
    """
    for role, placement in placements_of(config).items():
        try:
            type(placement).model_validate(placement.model_dump())
        except ValidationError as error:
            text = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise ConfigError(f"the configuration cannot run:\n  {role}: {text}") from None
    return resolve(config)


def _set_placement(config: StageConfig) -> Iterator[tuple[str, float]]:
    """The numbers of workers and resources that somebody set."""
    for role, placement in placements_of(config).items():
        for field in ("workers", "gpus", "cpus", "shards", "tensor_parallel", "micro_batch_tokens"):
            if is_set(config, f"{role}.{field}"):
                yield f"{role}.{field}", getattr(placement, field)

