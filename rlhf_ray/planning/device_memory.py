"""Where memory adds up: every GPU and every node's main memory, and who holds what of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_ray.config.generation import GenerationConfig
from rlhf_ray.config.learner import PPOLearnerConfig
from rlhf_ray.config.stages import StageConfig
from rlhf_ray.planning.nodes import Node
from rlhf_ray.planning.roles import Role
from rlhf_ray.planning.worker_memory import BUFFERS, DRIVER, MIB, RAY_HEAD, RUNTIME, WEIGHTS, Memory
from rlhf_ray.planning.worker_placement import Placement

OBJECT_STORE_SHARE, OBJECT_STORE_MOST = 0.3, 200e9
"""Of a node's memory, and bytes at most, that Ray takes for the object store where it is not told otherwise (its own
defaults)."""


@dataclass(frozen=True)
class Load:
    """One GPU, or one node's main memory."""

    node: str
    device: int | None
    """Number of the GPU; None for main memory."""
    kind: str
    """Of the GPU, or "memory"."""
    capacity: float
    """Bytes."""
    holders: Mapping[str, Mapping[str, float]]
    """Bytes by worker and part, at the moment when they hold most together."""

    @property
    def bytes(self) -> float:
        """Held at most."""
        return sum(sum(parts.values()) for parts in self.holders.values())

    @property
    def share(self) -> float:
        """Of the capacity."""
        return self.bytes / self.capacity if self.capacity else float("inf")

    @property
    def roles(self) -> dict[str, dict[str, float]]:
        """Bytes by role and part, the role that holds most first; in main memory Ray and its store are among them."""
        found: dict[str, dict[str, float]] = {}
        for holder, parts in self.holders.items():
            of_role = found.setdefault(holder.partition("/")[0], {})
            for part, amount in parts.items():
                of_role[part] = of_role.get(part, 0.0) + amount
        return dict(sorted(found.items(), key=lambda held: -sum(held[1].values())))

    def is_like(self, other: "Load") -> bool:
        """Whether it is the same kind of memory with the same roles, so that the same changes make room in it."""
        return (self.device is None) == (other.device is None) and self.roles.keys() == other.roles.keys()

    @property
    def name(self) -> str:
        """Readable."""
        return f"{self.node} {'memory' if self.device is None else f'GPU {self.device}'}"


def memories(roles: Sequence[Role], placement: Placement, nodes: Sequence[Node]) -> dict[str, Memory]:
    """One worker's memory by role, on the device where its first worker lies."""
    found = {}
    for role in roles:
        first = next((worker.node for worker in placement.workers if worker.role == role.name), nodes[0].name)
        found[role.name] = role.memory(next(node for node in nodes if node.name == first).device)
    return found


def loads_of(
    config: StageConfig, roles: Sequence[Role], placement: Placement, nodes: Sequence[Node]
) -> list[Load]:
    """All GPUs that are used, and the main memory of all nodes that are."""
    held = memories(roles, placement, nodes)
    settings = {role.name: role.placement for role in roles}
    loads = []
    for number, node in enumerate(nodes):
        here = [worker for worker in placement.workers if worker.node == node.name]
        if not here and number:
            continue
        for device in sorted({d for worker in here for d in worker.devices}):
            holders = {w.name: held[w.role].device for w in here if device in w.devices}
            taken = _in_turns({name: settings[name.partition("/")[0]] for name in holders}, holders)
            capacity = node.gpu.memory_bytes if node.gpu else 0.0
            loads.append(Load(node.name, device, node.gpu.name if node.gpu else "unknown GPU", capacity, taken))
        main: dict[str, Mapping[str, float]] = {worker.name: held[worker.role].host for worker in here}
        main |= {worker.name: held[worker.role].first for worker in here if not worker.rank and held[worker.role].first}
        main["object store"] = {"object store": store_bytes(config, nodes, node)}
        main["Ray"] = {RUNTIME: float(RAY_HEAD + (DRIVER if not number else 0))}
        loads.append(Load(node.name, None, "memory", node.memory_bytes, main))
    return loads


def store_bytes(config: StageConfig, nodes: Sequence[Node], node: Node) -> float:
    """The object store of a node: a local cluster's, or what Ray takes where nodes were started by themselves."""
    if config.cluster.address is None and len(nodes) == 1:
        return config.cluster.object_store_mb * float(MIB)
    return min(OBJECT_STORE_MOST, OBJECT_STORE_SHARE * node.memory_bytes)


def _in_turns(
    settings: Mapping[str, object], holders: Mapping[str, Mapping[str, float]]
) -> dict[str, Mapping[str, float]]:
    """What the workers of one GPU hold where generators sleep while learners work, or learners put their state aside
    while generators do: the phase in which it is more."""
    sleeping = {n for n, s in settings.items() if isinstance(s, GenerationConfig) and s.sleep_level}
    offloading = {n for n, s in settings.items() if isinstance(s, PPOLearnerConfig) and s.offload_between_phases}
    drawing = {n: _put_aside(parts) if n in offloading else parts for n, parts in holders.items()}
    learning = {n: _asleep(parts) if n in sleeping else parts for n, parts in holders.items()}

    def held(phase: Mapping[str, Mapping[str, float]]) -> float:
        return sum(sum(parts.values()) for parts in phase.values())

    return drawing if held(drawing) >= held(learning) else learning


def _asleep(parts: Mapping[str, float]) -> dict[str, float]:
    """A generator that sleeps keeps its process's context on the GPU; weights and cache are let go or moved away."""
    return {RUNTIME: parts.get(RUNTIME, 0.0)}


def _put_aside(parts: Mapping[str, float]) -> dict[str, float]:
    """A learner that put its optimizer's state aside (`TrainEngine.offload_state`) keeps weights, context and buffers;
    gradients and activations are there in an update alone."""
    return {name: amount for name, amount in parts.items() if name in (WEIGHTS, BUFFERS, RUNTIME)}
