"""Estimates the time of a step by role. It is meant to find the bottleneck, not exact seconds.

Rates are those of data sheets times the shares in `hardware.py`; lengths are assumed by `workload_of`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from rlhf_ray.config.derived import derive
from rlhf_ray.config.generation import GenerationConfig
from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.config.stages import PPOConfig, ScorerConfig, StageConfig
from rlhf_ray.planning.batch_layout import passes
from rlhf_ray.planning.hardware import CORE, Hardware
from rlhf_ray.planning.learner_memory import stage_of, trained
from rlhf_ray.planning.model_shape import ModelShape
from rlhf_ray.planning.node_spec import Node
from rlhf_ray.planning.publication_size import publication_bytes
from rlhf_ray.planning.roles import Role
from rlhf_ray.planning.roofline import KEPT, RECOMPUTED, STATE_BYTES, Engine, Group, Workload
from rlhf_ray.planning.worker_placement import Placement

FULL_PRECISION = 1 / 15
"""Rate of float32 matrix products over bfloat16 ones on a GPU (H100: 67 of 989 TFLOP/s, by its data sheet)."""
CALL_S = 0.02
"""Fixed cost of a role per step: calls, packing, logging. Of the order that a quickstart shows."""


@dataclass(frozen=True)
class StepTime:
    """Estimated seconds of a step."""

    roles: Mapping[str, float]
    """Seconds by role, all its workers in parallel."""
    seconds: float
    """Seconds of the whole step."""
    bottleneck: str
    """The role (or the machine's cores) that limits the step."""
    samples: int

    @property
    def samples_per_second(self) -> float:
        """Throughput of the whole loop."""
        return self.samples / self.seconds


def estimate_step_time(
    config: StageConfig, roles: Sequence[Role], placement: Placement, nodes: Sequence[Node]
) -> StepTime | None:
    """The estimate; None for a stage without steps."""
    devices = {role.name: _device(role, placement, nodes) for role in roles}
    named = {role.name: role for role in roles if role.models}
    if isinstance(config, PPOConfig):
        return _ppo(config, named, devices, nodes)
    if "learner" in named:
        batch, longest = config.training.batch_size, config.data.max_tokens  # type: ignore[attr-defined]
        work = Workload(batch, 0, max(1, longest // 2), tail=2.0, mini_batches=1)
        took = {"learner": update_s(named["learner"], devices["learner"], work)}
        seconds, bound = _on_cores(took, named, nodes, took["learner"], "learner")
        return StepTime(took, seconds, bound, batch)
    return None


def _ppo(
    config: PPOConfig, roles: Mapping[str, Role], devices: Mapping[str, Hardware], nodes: Sequence[Node]
) -> StepTime:
    work = workload_of(config)
    took = {"generator": generation_s(roles["generator"], devices["generator"], work)}
    for name in ("reference", "reward"):
        if name in roles:
            took[name] = max(scoring_s(roles[name], devices[name], work),
                             gathering_s(roles[name], devices[name], work, config.generator.chunk))
    learning = [name for name in ("policy", "critic") if name in roles]
    for name in learning:
        spared = name == "policy" and derive(config).old_logprobs != "policy"
        before = 0.0 if spared else scoring_s(roles[name], devices[name], work)
        took[name] = before + update_s(roles[name], devices[name], work)
    sent = publication_bytes(config, roles["policy"].models[0])
    took["publication"] = publication_s(roles["generator"], devices["generator"], sent)
    rollouts = {name: took[name] for name in took if name not in (*learning, "publication")}
    drawn, learned = max(rollouts.values()), max(took[name] for name in learning)
    if config.coordinator.max_staleness:
        whole = max(drawn, learned) + took["publication"]
    else:
        whole = drawn + learned + took["publication"]
    longer = rollouts if drawn >= learned else {name: took[name] for name in learning}
    seconds, bound = _on_cores(took, roles, nodes, whole, max(longer, key=lambda name: longer[name]))
    return StepTime(took, seconds, bound, config.coordinator.samples_per_step)


def workload_of(config: PPOConfig) -> Workload:
    """The workload that the estimate assumes, as lengths are not known in advance: prompts of half the maximum length,
    and response lengths uniform up to the maximum, so half of it on average."""
    return Workload(
        samples=config.coordinator.samples_per_step, prompt=max(1, config.prompts.max_tokens // 2),
        response=max(1, config.generator.sampling.max_tokens // 2), tail=2.0,
        mini_batches=config.algorithm.mini_batches, epochs=config.algorithm.epochs,
    )


def generation_s(role: Role, device: Hardware, work: Workload) -> float:
    """Seconds to generate all samples of a step, divided among the generators."""
    config = role.placement
    assert isinstance(config, GenerationConfig)
    engine = Engine(role.models[0], device, config.devices if config.gpus else config.threads)
    share = work.samples / config.workers
    at_a_time = max(1.0, min(share, config.max_sequences, engine.fitting(work)))
    return share * (engine.prefill_s(work.prompt) + work.response * engine.decode_s(at_a_time, work.held) / at_a_time)


def scoring_s(role: Role, device: Hardware, work: Workload) -> float:
    """Seconds of a forward pass over all samples through each of the role's models, divided among its workers."""
    place = role.placement
    units = place.workers * (max(place.gpus, 1) if place.gpus else place.threads)
    return CALL_S + sum(work.samples * shape.row_flops(work.row) / (
        units * device.flops * device.forward_share * precision(role, shape)) for shape in role.models)


def gathering_s(role: Role, device: Hardware, work: Workload, chunk: int) -> float:
    """Seconds in which the ranks of sharded models gather weights: once for each micro-batch of a call, while they
    compute. A call has `chunk` samples, which the ranks of a model divide."""
    place = role.placement
    assert isinstance(place, ScorerConfig)
    if place.shards == 1:
        return 0.0
    calls = work.samples / chunk / (place.workers / place.shards)
    each = ceil(chunk * work.row / place.shards / place.micro_batch_tokens)
    return CALL_S + calls * each * sum(
        Group(shape, device, place.shards).gather_s(shape.bytes_per_value) for shape in role.models)


def update_s(role: Role, device: Hardware, work: Workload) -> float:
    """Seconds of all optimizer steps of an update: passes, communication of gradients, and AdamW."""
    config, shape = role.placement, role.models[0]
    assert isinstance(config, LearnerConfig)
    ranks = config.workers * (1 if config.gpus else config.threads)
    rows = work.samples / work.mini_batches
    flops = rows * (RECOMPUTED if config.gradient_checkpointing else KEPT) * shape.row_flops(work.row)
    rate = device.flops * device.training_share * precision(role, shape)
    compute = flops / (min(ranks, max(1.0, rows * (config.threads if not config.gpus else 1))) * rate)
    group = Group(shape, device, config.workers)
    count = passes(config, rows, work.row)
    moved = {0: 1, 1: 1, 2: count, 3: 3 * count}[stage_of(config)] * group.gather_s() if config.workers > 1 else 0.0
    shared = config.workers if stage_of(config) else 1
    adam = 2 * STATE_BYTES * trained(config, shape) / (shared * device.memory_bandwidth * device.memory_share)
    return (max(compute, moved) + adam + CALL_S / 4) * work.mini_batches * work.epochs


def publication_s(role: Role, device: Hardware, nbytes: float) -> float:
    """Seconds to send a publication to each node over the network, and from its memory into the engine."""
    spans = role.placement.devices if isinstance(role.placement, GenerationConfig) else 1
    return nbytes / (device.network_bandwidth * device.network_share) + nbytes / spans / device.host_bandwidth


def precision(role: Role, shape: ModelShape) -> float:
    """Rate of the role's matrix products relative to bfloat16, which a GPU's figures are for."""
    config = role.placement
    if not config.gpus:
        return 1.0
    half = config.autocast == "bfloat16" if isinstance(config, LearnerConfig) else shape.bytes_per_value == 2
    return 1.0 if half else FULL_PRECISION


def _device(role: Role, placement: Placement, nodes: Sequence[Node]) -> Hardware:
    if not role.placement.gpus:
        return CORE
    names = {worker.node for worker in placement.workers if worker.role == role.name}
    return next((node.device for node in nodes if node.name in names), CORE)


def _on_cores(
    took: Mapping[str, float], roles: Mapping[str, Role], nodes: Sequence[Node], whole: float, bound: str
) -> tuple[float, str]:
    """Seconds and bottleneck of a step, at least the time that all roles on CPUs together keep all cores busy."""
    busy = sum(seconds * roles[name].placement.workers * roles[name].placement.threads
               for name, seconds in took.items() if name in roles and not roles[name].placement.gpus)
    cores = sum(node.cores for node in nodes)
    return (busy / cores, f"the {cores:g} cores") if cores and busy / cores > whole else (whole, bound)
