"""Bundles onto nodes and workers onto devices: what Ray would do with the pools, worked out without it.

`config.flow.seats` says which bundle a worker lives in. Here bundles find nodes, those that are hardest to place first,
each pool by its strategy. Ray may choose other nodes of the same kind; where this finds no place, Ray hardly will.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_ray.config.flow import seats
from rlhf_ray.config.run import PlacementConfig, PoolConfig
from rlhf_ray.planning.feasible import carries
from rlhf_ray.planning.nodes import Node

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


class _Room:
    """What is left of a node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.cpus, self.gpus, self.resources = node.cpus, float(node.gpus), dict(node.resources)
        self.first_gpu = 0
        self.of_pool: Counter[str] = Counter()

    def holds(self, pool: PoolConfig, count: int = 1) -> bool:
        """Whether that many bundles find room, labels included."""
        return (self.labelled(pool) and self.cpus + CLOSE >= count * pool.cpus
                and self.gpus + CLOSE >= count * pool.gpus
                and all(self.resources.get(k, 0.0) + CLOSE >= count * v for k, v in custom(pool).items()))

    def labelled(self, pool: PoolConfig) -> bool:
        """Whether the node carries the pool's labels."""
        return carries(self.node.labels, pool.labels)

    def take(self, name: str, pool: PoolConfig) -> int:
        """Give a bundle its share; returns the first of its GPUs."""
        self.cpus -= pool.cpus
        self.gpus -= pool.gpus
        for key, amount in custom(pool).items():
            self.resources[key] -= amount
        self.of_pool[name] += 1
        first, self.first_gpu = self.first_gpu, self.first_gpu + pool.gpus
        return first


def custom(pool: PoolConfig) -> Mapping[str, float]:
    """A bundle's custom resources."""
    return pool.resources


def place(
    pools: dict[str, PoolConfig], placements: dict[str, PlacementConfig], nodes: Sequence[Node]
) -> Placement:
    """Lay pools over nodes and workers into bundles.

    Raises:
        ValueError: as `config.flow.seats`; a loaded configuration has passed it.
    """
    rooms = [_Room(node) for node in nodes]
    bundles: dict[tuple[str, int], str] = {}
    first_gpu: dict[tuple[str, int], int] = {}
    shortages = []
    for name in sorted(pools, key=lambda n: _difficulty(pools[n]), reverse=True):
        for number in range(pools[name].bundles):
            room = _room_for(name, pools[name], rooms, number)
            if room is None:
                shortages.append(_shortage(name, pools[name], number, nodes, rooms))
                break
            first_gpu[name, number] = room.take(name, pools[name])
            bundles[name, number] = room.node.name
    workers = _workers(pools, placements, bundles, first_gpu)
    return Placement(tuple(workers), bundles, tuple(shortages))


def _difficulty(pool: PoolConfig) -> tuple[int, bool, float, float]:
    return len(pool.labels) + len(custom(pool)), pool.strategy.startswith("STRICT"), pool.gpus, pool.cpus


def _room_for(name: str, pool: PoolConfig, rooms: list[_Room], number: int) -> _Room | None:
    """The node of a pool's next bundle."""
    if pool.strategy == "STRICT_PACK":
        if number == 0:
            return next((room for room in rooms if room.holds(pool, pool.bundles)), None)
        return next(room for room in rooms if room.of_pool[name])
    holding = [room for room in rooms if room.holds(pool)]
    if pool.strategy == "STRICT_SPREAD":
        return next((room for room in holding if not room.of_pool[name]), None)
    if pool.strategy == "SPREAD":
        return min(holding, key=lambda room: room.of_pool[name], default=None)
    return max(holding, key=lambda room: bool(room.of_pool[name]), default=None)


def _shortage(name: str, pool: PoolConfig, placed: int, nodes: Sequence[Node], rooms: list[_Room]) -> str:
    """What a pool asks for and what there is, and which field to lower."""
    ask = f"{pool.bundles} bundles of {pool.cpus:g} CPUs and {pool.gpus} GPUs"
    labelled = [room for room in rooms if room.labelled(pool)]
    if pool.labels and not labelled:
        return (f"pools.{name}.labels={dict(pool.labels)}: none of the {len(nodes)} nodes carries them; correct the "
                "labels, or add such nodes")
    largest = max((room.node for room in labelled), key=lambda node: (node.gpus, node.cpus))
    if pool.gpus > largest.gpus or pool.cpus > largest.cpus + CLOSE:
        field = "gpus" if pool.gpus > largest.gpus else "cpus"
        most = largest.gpus if field == "gpus" else largest.cpus
        return (f"pools.{name}.{field}={getattr(pool, field):g} is more than any node has ({most:g}): a bundle lies on "
                f"one node; set pools.{name}.{field} to {most:g} at most and raise pools.{name}.bundles")
    missing = [f"{key} {amount:g}" for key, amount in custom(pool).items()
               if not any(room.node.resources.get(key, 0) >= amount for room in labelled)]
    if missing:
        return (f"pools.{name}.resources asks for {', '.join(missing)} in a bundle, which no node has; correct the "
                "name, or start nodes with it (`ray start --resources`)")
    free = f"{sum(r.cpus for r in labelled):g} CPUs and {sum(r.gpus for r in labelled):g} GPUs"
    return (f"pools.{name} asks for {ask} ({pool.strategy}); {placed} find a place and {free} are left on "
            f"{len(labelled)} fitting nodes, not enough on one of them for the next; lower pools.{name}.bundles to "
            f"{max(placed, 1)}, another pool, or add nodes")


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
