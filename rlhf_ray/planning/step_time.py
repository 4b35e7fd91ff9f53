"""Estimates the time of a step by role. It is meant to find the bottleneck, not exact seconds.

Rates are those of data sheets times the shares in `hardware.py`; lengths are assumed by `workload_of`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from rlhf_ray.config.derived import derive, open_episodes
from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.config.generation import GenerationConfig
from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.config.stages import EvaluateConfig, PPOConfig, ScorerConfig, StageConfig, role_facts
from rlhf_ray.planning.batch_layout import passes
from rlhf_ray.planning.hardware import CORE, Hardware
from rlhf_ray.planning.learner_memory import stage_of, trained
from rlhf_ray.planning.model_shape import ModelShape
from rlhf_ray.planning.node_spec import Node
from rlhf_ray.planning.publication_size import publication_bytes
from rlhf_ray.planning.roles import Role
from rlhf_ray.planning.roofline import KEPT, RECOMPUTED, STATE_BYTES, Engine, Workload, gather_s
from rlhf_ray.planning.worker_placement import Placement

FULL_PRECISION = 1 / 15
"""Rate of float32 matrix products over bfloat16 ones on a GPU (H100: 67 of 989 TFLOP/s, by its data sheet)."""
CALL_S = 0.02
"""Fixed cost of a role per step: calls, packing, logging. Of the order that a quickstart shows."""


COORDINATOR_S = 0.4e-3
"""CPU time of the coordinator per sample, on one core for any number of workers (`coordinator_ms_per_sample` in
docs/benchmarks.md: 0.37 ms)."""


@dataclass(frozen=True)
class StepTime:
    """Estimated seconds of a step."""

    roles: Mapping[str, float]
    """Seconds by role, all its workers in parallel."""
    seconds: float
    """Seconds of the whole step."""
    bottleneck: str
    """The role (or the machine's cores, or the coordinator) that limits the step."""
    samples: int

    @property
    def samples_per_second(self) -> float:
        """Throughput of the whole loop."""
        return self.samples / self.seconds


def estimate_step_time(
    config: StageConfig, roles: Sequence[Role], placement: Placement, nodes: Sequence[Node],
    work: Workload | None = None,
) -> StepTime | None:
    """The estimate; None for a stage without steps.

    Args:
        work: the batch with its lengths; None assumes them.
    """
    devices = {role.name: _device(role, placement, nodes) for role in roles}
    named = {role.name: role for role in roles if role.models}
    if isinstance(config, EvaluateConfig):
        return None
    if isinstance(config, PPOConfig):
        return _ppo(config, named, devices, placement, nodes, work or workload_of(config))
    if "learner" in named:
        batch, longest = config.training.batch_size, config.data.max_tokens  # type: ignore[attr-defined]
        work = work or Workload(batch, 0, max(1, longest // 2), tail=2.0, mini_batches=1)
        took = {"learner": update_s(named["learner"], devices["learner"], work)}
        seconds, bound = _on_cores(took, named, nodes, took["learner"], "learner")
        return StepTime(took, seconds, bound, batch)
    return None


def _ppo(
    config: PPOConfig, roles: Mapping[str, Role], devices: Mapping[str, Hardware], placement: Placement,
    nodes: Sequence[Node], work: Workload,
) -> StepTime:
    staleness = config.coordinator.max_staleness
    side_by_side = open_episodes(config) / config.generator.workers if config.environments else inf
    took = {"generator": generation_s(roles["generator"], devices["generator"], work, staleness, side_by_side)}
    stations = {name: facts.station for name, facts in role_facts(type(config)).items() if name in roles}
    for name in (name for name, station in stations.items() if station == "scoring"):
        took[name] = max(scoring_s(roles[name], devices[name], work),
                         gathering_s(roles[name], devices[name], work, config.generator.chunk))
    learning = [name for name, station in stations.items() if station == "learning"]
    for name in learning:
        spared = name == "policy" and derive(config).old_logprobs != "policy"
        before = 0.0 if spared else scoring_s(roles[name], devices[name], work)
        took[name] = before + update_s(roles[name], devices[name], work)
    took["publication"] = publication_s(config, roles, devices, placement)
    took["coordinator"] = work.samples * COORDINATOR_S
    sides = [_side([name for name in took if name in roles and name not in learning], took, placement),
             _side(learning, took, placement)]
    seconds = [side for side, _ in sides]
    both, _ = _side([name for name in took if name in roles], took, placement)  # also those of different sides
    whole = (max(*seconds, both) if staleness else sum(seconds)) + took["publication"]
    bound = "publication" if took["publication"] > max(seconds) else max(sides)[1]
    if took["coordinator"] > whole:
        whole = took["coordinator"]
        bound = "coordinator"
    whole, bound = _on_cores(took, roles, nodes, whole, bound)
    return StepTime(took, whole, bound, config.coordinator.samples_per_step)


def _side(names: Sequence[str], took: Mapping[str, float], placement: Placement) -> tuple[float, str]:
    """Seconds in which roles that work at the same time finish, and the longest of them. Roles that share a GPU take
    turns on it."""
    sharing: dict[tuple[str, int], set[str]] = {}
    for worker in placement.workers:
        if worker.role in names:
            for device in worker.devices:
                sharing.setdefault((worker.node, device), set()).add(worker.role)
    together = max((sum(took[name] for name in roles) for roles in sharing.values()), default=0.0)
    longest = max(names, key=lambda name: took[name])
    return max(together, took[longest]), longest


def workload_of(config: PPOConfig) -> Workload:
    """The workload that the estimate assumes, as lengths are not known in advance: prompts of half the maximum length,
    and response lengths uniform up to the maximum, so half of it on average. Episodes have half of their turns and
    tokens; what the turns do not sample of these is what environments answer. What environments compute is not
    counted."""
    prompt = max(1, config.prompts.max_tokens // 2)
    turn = max(1, config.generator.sampling.max_tokens // 2)
    work = Workload(
        samples=config.coordinator.samples_per_step, prompt=prompt, response=turn, tail=2.0,
        mini_batches=config.algorithm.mini_batches, epochs=config.algorithm.epochs,
    )
    if not config.environments:
        return work
    each = [_turns_tokens(environment, prompt, turn) for environment in config.environments.values()]
    turns, sampled, read = (max(1, round(sum(column) / len(each))) for column in zip(*each, strict=True))
    generator = config.generator
    cached = generator.gpus > 0 and generator.vllm.get("enable_prefix_caching") is not False
    return replace(work, turns=turns, response=sampled, read=read, prefix_cached=cached)


def _turns_tokens(environment: EnvironmentConfig, prompt: int, turn: int) -> tuple[int, int, int]:
    """Mean turns of an episode, tokens that are sampled in it, and those that the environment answers."""
    turns = ceil(environment.max_turns / 2)
    room = max(2, environment.max_tokens // 2 - prompt)
    sampled = min(turns * turn, room - 1)
    return turns, sampled, room - sampled


def generation_s(role: Role, device: Hardware, work: Workload, staleness: int, most: float = inf) -> float:
    """Seconds to generate all samples of a step, divided among the generators; the longest response bounds it.

    Args:
        most: samples that are open at each generator at most; episodes wait for a runner, others for nothing.
    """
    config = role.placement
    assert isinstance(config, GenerationConfig)
    engine = Engine(role.models[0], device, config.devices if config.gpus else config.threads)
    return engine.step_s(work, work.samples / config.workers, staleness, min(most, config.max_sequences))


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
        gather_s(shape, device, place.shards, shape.bytes_per_value) for shape in role.models)


def update_s(role: Role, device: Hardware, work: Workload) -> float:
    """Seconds of all optimizer steps of an update: passes, communication of gradients, and AdamW. Rows are not split,
    so no mini-batch is faster than its longest row on one rank."""
    config = role.placement
    shape = role.models[0]
    assert isinstance(config, LearnerConfig)
    threads = 1 if config.gpus else config.threads
    rows = work.samples / work.mini_batches
    each = KEPT + (RECOMPUTED - KEPT) * config.recomputed(shape.layers) / shape.layers
    rate = device.flops * device.training_share * precision(role, shape) * threads
    longest = work.prompt + work.read + replace(work, samples=max(1, round(rows))).longest
    compute = each * max(rows * shape.row_flops(work.row) / config.workers, shape.row_flops(longest)) / rate
    count = passes(config, rows, work.row)
    gathers = {0: 1, 1: 1, 2: count, 3: 3 * count}[stage_of(config)] if config.workers > 1 else 0
    moved = gathers * gather_s(shape, device, config.workers)
    shared = config.workers if stage_of(config) else 1
    adam = 2 * STATE_BYTES * trained(config, shape) / (shared * device.memory_bandwidth * device.memory_share)
    return (max(compute, moved) + adam + CALL_S / 4) * work.mini_batches * work.epochs


def publication_s(
    config: PPOConfig, roles: Mapping[str, Role], devices: Mapping[str, Hardware], placement: Placement
) -> float:
    """Seconds of a publication. Its stages overlap bucket by bucket: sharded weights are gathered in float32, the first
    rank copies them to main memory and sends them over its network card. Then generators load them.

    The object store sends one copy to each node with generators, one after the other as far as the card is concerned
    (Ray's release test sends 1 GiB from a 20 Gb/s node to 49 others in 16.9 s, 1.3 times the rate of the card:
    release/perf_metrics/scalability/object_store.json). A broadcast by NCCL passes each node once.
    """
    policy = roles["policy"]
    generator = roles["generator"]
    assert isinstance(policy.placement, LearnerConfig) and isinstance(generator.placement, GenerationConfig)
    nbytes = publication_bytes(config, policy.models[0])
    device = devices["policy"]
    sharded = stage_of(policy.placement) == 3
    gathered = gather_s(policy.models[0], device, policy.placement.workers) if sharded else 0.0
    if config.policy.lora is not None:
        gathered *= trained(policy.placement, policy.models[0]) / policy.models[0].parameters
    home = {worker.node for worker in placement.workers if worker.role == "policy" and worker.rank == 0}
    others = len({worker.node for worker in placement.workers if worker.role == "generator"} - home)
    card = device.network_bandwidth / device.cards * device.network_share
    if config.weights.transport != "object_store":
        rate = card if others else device.link_bandwidth * device.network_share
        return max(gathered, nbytes / rate)
    copied = nbytes / device.host_bandwidth if policy.placement.gpus else 0.0
    loading = nbytes / generator.placement.devices / devices["generator"].host_bandwidth
    return max(gathered, copied, others * nbytes / card) + loading


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
