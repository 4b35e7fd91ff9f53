"""Memory use of every GPU and of every node's main memory, by worker and part."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_ray.config.generation import GenerationConfig
from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.planning.memory_breakdown import DRIVER, MIB, RAY_HEAD, RUNTIME, Memory
from rlhf_ray.planning.node_spec import Node
from rlhf_ray.planning.roles import Role
from rlhf_ray.planning.worker_placement import Placement

OBJECT_STORE_SHARE, OBJECT_STORE_MOST = 0.3, 200e9
"""Share of a node's memory, and maximum in bytes, that Ray gives the object store by default."""


@dataclass(frozen=True)
class Load:
    """One GPU, or one node's main memory."""

    node: str
    device: int | None
    """Number of the GPU; None for main memory."""
    kind: str
    """Name of the GPU, or "memory"."""
    capacity: float
    """Bytes."""
    holders: Mapping[str, Mapping[str, float]]
    """Bytes by worker and part, at the moment when their sum is largest."""

    @property
    def bytes(self) -> float:
        """Peak use in bytes."""
        return sum(sum(parts.values()) for parts in self.holders.values())

    @property
    def share(self) -> float:
        """Peak use as a share of the capacity."""
        return self.bytes / self.capacity if self.capacity else float("inf")

    @property
    def roles(self) -> dict[str, dict[str, float]]:
        """Bytes by role and part, the largest role first; in main memory these include Ray and its object store."""
        found: dict[str, dict[str, float]] = {}
        for holder, parts in self.holders.items():
            of_role = found.setdefault(holder.partition("/")[0], {})
            for part, amount in parts.items():
                of_role[part] = of_role.get(part, 0.0) + amount
        return dict(sorted(found.items(), key=lambda held: -sum(held[1].values())))

    def is_like(self, other: "Load") -> bool:
        """Whether this is the same kind of memory with the same roles, so that the same changes free memory in it."""
        return (self.device is None) == (other.device is None) and self.roles.keys() == other.roles.keys()

    @property
    def name(self) -> str:
        """Name for messages, such as "node-0 GPU 3"."""
        return f"{self.node} {'memory' if self.device is None else f'GPU {self.device}'}"


def worker_memories(roles: Sequence[Role], placement: Placement, nodes: Sequence[Node]) -> dict[str, Memory]:
    """Memory of one worker of each role, on the device where the role's first worker runs."""
    found = {}
    for role in roles:
        first = next((worker.node for worker in placement.workers if worker.role == role.name), nodes[0].name)
        found[role.name] = role.memory(next(node for node in nodes if node.name == first).device)
    return found


def loads_of(
    cluster: ClusterConfig, roles: Sequence[Role], placement: Placement, nodes: Sequence[Node]
) -> list[Load]:
    """Loads of all GPUs in use, and of the main memory of all nodes in use."""
    held = worker_memories(roles, placement, nodes)
    settings = {role.name: role.placement for role in roles}
    loads = []
    for number, node in enumerate(nodes):
        here = [worker for worker in placement.workers if worker.node == node.name]
        if not here and number:
            continue
        for device in sorted({d for worker in here for d in worker.devices}):
            holders = {w.name: held[w.role] for w in here if device in w.devices}
            taken = _time_shared({name: settings[name.partition("/")[0]] for name in holders}, holders)
            capacity = node.gpu.memory_bytes if node.gpu else 0.0
            loads.append(Load(node.name, device, node.gpu.name if node.gpu else "unknown GPU", capacity, taken))
        main: dict[str, Mapping[str, float]] = {worker.name: held[worker.role].host for worker in here}
        main |= {worker.name: held[worker.role].first for worker in here if not worker.rank and held[worker.role].first}
        main["object store"] = {"object store": store_bytes(cluster, nodes, node)}
        main["Ray"] = {RUNTIME: float(RAY_HEAD + (DRIVER if not number else 0))}
        loads.append(Load(node.name, None, "memory", node.memory_bytes, main))
    return loads


def store_bytes(cluster: ClusterConfig, nodes: Sequence[Node], node: Node) -> float:
    """Bytes of a node's object store: the configured size in a local cluster, else Ray's default."""
    if cluster.address is None and len(nodes) == 1:
        return cluster.object_store_mb * float(MIB)
    return min(OBJECT_STORE_MOST, OBJECT_STORE_SHARE * node.memory_bytes)


def _time_shared(settings: Mapping[str, object], memories: Mapping[str, Memory]) -> dict[str, Mapping[str, float]]:
    """Bytes that the workers of one GPU hold in the larger phase: in updates, when generators may sleep, or in
    rollouts, when learners score, and may have offloaded their state."""
    sleeping = {n for n, s in settings.items() if isinstance(s, GenerationConfig) and s.sleep_level}
    drawing = {n: memory.in_rollouts or memory.device for n, memory in memories.items()}
    learning = {n: _sleeping(memory.device) if n in sleeping else memory.device for n, memory in memories.items()}

    def held(phase: Mapping[str, Mapping[str, float]]) -> float:
        return sum(sum(parts.values()) for parts in phase.values())

    return drawing if held(drawing) >= held(learning) else learning


def _sleeping(parts: Mapping[str, float]) -> dict[str, float]:
    """A sleeping generator keeps only its CUDA context on the GPU; weights and cache are freed or offloaded."""
    return {RUNTIME: parts.get(RUNTIME, 0.0)}
