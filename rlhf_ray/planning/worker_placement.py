"""Workers on the devices of nodes: computes what Ray would do with the pools, without Ray.

`config.bundle_assignment.worker_bundles` gives the bundle of a worker, `bundle_packing` the node of the bundle.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_ray.config.bundle_assignment import worker_bundles
from rlhf_ray.config.run import PlacementConfig, PoolConfig
from rlhf_ray.planning.bundle_packing import Arrangement, arrange
from rlhf_ray.planning.node_spec import Node
from rlhf_ray.planning.placement_errors import explain_shortage

CLOSE = 1e-6


@dataclass(frozen=True)
class Worker:
    """One process of a role, and where it runs."""

    role: str
    rank: int
    pool: str
    bundle: int
    node: str
    devices: tuple[int, ...]
    """Indices of the node's GPUs that it uses; empty on the CPU."""

    @property
    def name(self) -> str:
        """Name as in Ray's dashboard."""
        return f"{self.role}/{self.rank}"


@dataclass(frozen=True)
class Placement:
    """Where every worker runs, and the pools that were not placed."""

    workers: tuple[Worker, ...]
    shortages: tuple[str, ...]
    """A message for each pool that does not fit."""


def place(
    pools: dict[str, PoolConfig], placements: dict[str, PlacementConfig], nodes: Sequence[Node]
) -> Placement:
    """Assign bundles of pools to nodes, and workers to bundles.

    Raises:
        ValueError: as `config.bundle_assignment.worker_bundles`; a loaded configuration has passed that check.
    """
    arrangement = arrange(pools, nodes)
    bundles, first_gpu = _bundles(pools, arrangement, nodes)
    workers = _workers(pools, placements, bundles, first_gpu)
    return Placement(tuple(workers), tuple(explain_shortage(pools, nodes, arrangement)))


def _bundles(
    pools: Mapping[str, PoolConfig], arrangement: Arrangement, nodes: Sequence[Node]
) -> tuple[dict[tuple[str, int], str], dict[tuple[str, int], int]]:
    """Node of each placed bundle, and the index of its first GPU there."""
    bundles, first_gpu, taken = {}, {}, dict.fromkeys((node.name for node in nodes), 0)
    for name, shares in arrangement.shares.items():
        assignments = [node.name for node, count in zip(nodes, shares, strict=True) for _ in range(count)]
        for number, home in enumerate(assignments):
            bundles[name, number], first_gpu[name, number] = home, taken[home]
            taken[home] += pools[name].gpus
    return bundles, first_gpu


def _workers(
    pools: dict[str, PoolConfig], placements: dict[str, PlacementConfig],
    bundles: Mapping[tuple[str, int], str], first_gpu: Mapping[tuple[str, int], int],
) -> list[Worker]:
    taken: dict[tuple[str, int], list[float]] = {}
    workers = []
    for slot in worker_bundles(pools, placements):
        key = slot.pool, slot.bundle
        if key not in bundles:
            continue
        load = taken.setdefault(key, [0.0] * pools[slot.pool].gpus)
        devices = _devices(load, placements[slot.role].gpus)
        workers.append(Worker(slot.role, slot.rank, slot.pool, slot.bundle, bundles[key],
                              tuple(first_gpu[key] + d for d in devices)))
    order = list(placements)
    return sorted(workers, key=lambda worker: (order.index(worker.role), worker.rank))


def _devices(load: list[float], gpus: float) -> list[int]:
    """Devices of a bundle for a worker: whole ones, or the first with enough left for its fraction."""
    if not gpus:
        return []
    share = min(gpus, 1.0)
    fitting = [i for i, taken in enumerate(load) if taken + share <= 1 + CLOSE]
    chosen = fitting[: max(1, round(gpus))]
    for i in chosen:
        load[i] += share
    return chosen
