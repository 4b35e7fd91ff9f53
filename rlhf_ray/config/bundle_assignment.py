"""Who lives in which bundle of a pool: chosen here, so that what was found to fit is how workers come to lie.

A worker lives in one bundle. The workers of a role are spread over the bundles of their pool where that leaves room for
all others (a node that is lost takes as few of them as possible, and ranks do not share one machine's memory
bandwidth); otherwise the largest workers come first and each takes the first bundle with room for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlhf_ray.config.run import PlacementConfig, PoolConfig

Worker = tuple[str, int]
"""Name of a role's section (or of a role without one), and rank."""
ROUNDING = 1e-6
"""Fractions of a CPU add up to a whole in floating point no more exactly than that."""


@dataclass
class Bundle:
    """What is left in one bundle."""

    cpus: float
    gpus: float

    def has_room(self, place: PlacementConfig) -> bool:
        """Whether a worker fits beside those that are there."""
        return self.cpus + ROUNDING >= place.cpus and self.gpus + ROUNDING >= place.gpus


Choice = Callable[["Bundles", str, PlacementConfig], "int | None"]
"""Chooses a bundle for a worker of a role."""


class Bundles:
    """The bundles of one pool, numbered from 0, and their inhabitants."""

    def __init__(self, pool: PoolConfig) -> None:
        self._pool = pool
        self._left = [Bundle(pool.cpus, float(pool.gpus)) for _ in range(pool.bundles)]
        self.assignments: dict[Worker, int] = {}
        """Worker -> its bundle."""
        self._shares: dict[Worker, PlacementConfig] = {}

    def __len__(self) -> int:
        return len(self._left)

    def assign(self, worker: Worker, place: PlacementConfig, number: int) -> None:
        """Give a worker its share of a bundle; it leaves the one where it was."""
        self.leave(worker)
        self._left[number].cpus -= place.cpus
        self._left[number].gpus -= place.gpus
        self.assignments[worker], self._shares[worker] = number, place

    def leave(self, worker: Worker) -> None:
        """The worker's share is free again; nothing happens for one who has none."""
        number, place = self.assignments.pop(worker, None), self._shares.pop(worker, None)
        if number is not None and place is not None:
            self._left[number].cpus += place.cpus
            self._left[number].gpus += place.gpus

    def add(self) -> int:
        """One bundle more; its number."""
        self._left.append(Bundle(self._pool.cpus, float(self._pool.gpus)))
        return len(self._left) - 1

    def remove_last(self) -> None:
        """One bundle less; nobody lives in the last one."""
        self._left.pop()

    def occupants(self, number: int) -> list[Worker]:
        """Who lives in a bundle."""
        return [worker for worker, home in self.assignments.items() if home == number]

    def room(self, place: PlacementConfig) -> list[int]:
        """Bundles that have room for a worker."""
        return [number for number, left in enumerate(self._left) if left.has_room(place)]


def spread(bundles: Bundles, role: str, place: PlacementConfig) -> int | None:
    """Of the bundles with room that with the fewest workers of the role, the first of several."""
    neighbours = [0] * len(bundles)
    for (other, _), number in bundles.assignments.items():
        neighbours[number] += other == role
    return min(bundles.room(place), key=lambda number: (neighbours[number], number), default=None)


def first_with_room(bundles: Bundles, _: str, place: PlacementConfig) -> int | None:
    """The first bundle with room."""
    return next(iter(bundles.room(place)), None)


def assigned(pool: PoolConfig, placements: Mapping[str, PlacementConfig]) -> Bundles | PlacementConfig:
    """Every worker of the roles in its bundle; or, where somebody found none, the placement of the first such.

    Args:
        placements: of the roles of this pool, by section.
    """
    failed: PlacementConfig | None = None
    for choose in (spread, first_with_room):
        found = _assigned(pool, placements, choose)
        if isinstance(found, Bundles):
            return found
        failed = found
    assert failed is not None
    return failed


def _assigned(pool: PoolConfig, placements: Mapping[str, PlacementConfig], choose: Choice) -> Bundles | PlacementConfig:
    bundles = Bundles(pool)
    workers = [((role, rank), place) for role, place in placements.items() for rank in range(place.workers)]
    for worker, place in sorted(workers, key=lambda item: (-item[1].gpus, -item[1].cpus)):
        number = choose(bundles, worker[0], place)
        if number is None:
            return place
        bundles.assign(worker, place, number)
    return bundles


@dataclass(frozen=True)
class BundleSlot:
    """Where one worker of a role lives."""

    role: str
    rank: int
    pool: str
    bundle: int
    """Number of the bundle in its pool."""


def check_bundles(pools: dict[str, PoolConfig], placements: dict[str, PlacementConfig]) -> None:
    """Every worker must find a bundle with room for it; errors as in `worker_bundles`."""
    worker_bundles(pools, placements)


def worker_bundles(pools: dict[str, PoolConfig], placements: dict[str, PlacementConfig]) -> list[BundleSlot]:
    """The bundle of every worker, as `assigned` chooses it: sums over a pool do not tell.

    Raises:
        ValueError: a worker finds none.
    """
    found = []
    for name, pool in pools.items():
        users = {role: place for role, place in placements.items() if place.pool == name}
        bundles = assigned(pool, users)
        if not isinstance(bundles, Bundles):
            role, place = next((role, place) for role, place in users.items() if place is bundles)
            raise ValueError(
                f"pools.{name}: its {pool.bundles} bundles of {pool.cpus:g} cpus and {pool.gpus:g} gpus have room "
                f"for all workers together, but not one by one: a worker lives in one bundle, and {role} with "
                f"{place.cpus:g} cpus and {place.gpus:g} gpus finds none; make bundles larger or give {role} less")
        found += [BundleSlot(role, rank, name, number) for (role, rank), number in bundles.assignments.items()]
    return found
