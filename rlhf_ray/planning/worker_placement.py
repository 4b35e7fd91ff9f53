"""Workers on the devices of nodes: what Ray would do with the pools, worked out without it.

`config.bundle_assignment.seats` gives the bundle of a worker, `bundle_packing` the node of the bundle.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_ray.config.bundle_assignment import seats
from rlhf_ray.config.run import PlacementConfig, PoolConfig
from rlhf_ray.planning.bundle_packing import Arrangement, arrange
from rlhf_ray.planning.nodes import Node
from rlhf_ray.planning.placement_errors import why_not

CLOSE = 1e-6


@dataclass(frozen=True)
class Worker:
    """One process of a role, and where it lies."""

    role: str
    rank: int
    pool: str
    bundle: int
    node: str
    devices: tuple[int, ...]
    """Numbers of the node's GPUs that it computes on; none on the CPU."""

    @property
    def name(self) -> str:
        """As Ray's dashboard has it."""
        return f"{self.role}/{self.rank}"


@dataclass(frozen=True)
class Placement:
    """Where everything is, and what found no place."""

    workers: tuple[Worker, ...]
    bundles: Mapping[tuple[str, int], str]
    """Node of each bundle."""
    shortages: tuple[str, ...]
    """A sentence for each pool that does not fit."""


def place(
    pools: dict[str, PoolConfig], placements: dict[str, PlacementConfig], nodes: Sequence[Node]
) -> Placement:
    """Lay pools over nodes and workers into bundles.

    Raises:
        ValueError: as `config.bundle_assignment.seats`; a loaded configuration has passed it.
    """
    found = arrange(pools, nodes)
    bundles, first_gpu = _bundles(pools, found, nodes)
    workers = _workers(pools, placements, bundles, first_gpu)
    return Placement(tuple(workers), bundles, tuple(why_not(pools, nodes, found)))


def _bundles(
    pools: Mapping[str, PoolConfig], found: Arrangement, nodes: Sequence[Node]
) -> tuple[dict[tuple[str, int], str], dict[tuple[str, int], int]]:
    """Of each bundle that has a place, its node and the first of its GPUs there."""
    bundles, first_gpu, taken = {}, {}, dict.fromkeys((node.name for node in nodes), 0)
    for name, shares in found.shares.items():
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
    for seat in seats(pools, placements):
        key = seat.pool, seat.bundle
        if key not in bundles:
            continue
        load = taken.setdefault(key, [0.0] * pools[seat.pool].gpus)
        devices = _devices(load, placements[seat.role].gpus)
        workers.append(Worker(seat.role, seat.rank, seat.pool, seat.bundle, bundles[key],
                              tuple(first_gpu[key] + d for d in devices)))
    order = list(placements)
    return sorted(workers, key=lambda worker: (order.index(worker.role), worker.rank))


def _devices(load: list[float], gpus: float) -> list[int]:
    """Devices of a bundle that take a worker: whole ones, or the first with room for its fraction."""
    if not gpus:
        return []
    share = min(gpus, 1.0)
    fitting = [i for i, taken in enumerate(load) if taken + share <= 1 + CLOSE]
    chosen = fitting[: max(1, round(gpus))]
    for i in chosen:
        load[i] += share
    return chosen
