"""Assigns workers to the bundles of their pool. Checks and placement use the same assignment.

Each worker is assigned to one bundle. The workers of a role are spread over the bundles of their pool if all other
workers still fit (so that a lost node takes few of them, and ranks do not share one machine's memory bandwidth);
otherwise the largest workers come first, and each takes the first bundle with enough resources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlhf_ray.config.run import PlacementConfig, PoolConfig

Worker = tuple[str, int]
"""Name of a role's section (or of a role without one), and rank."""
ROUNDING = 1e-6
"""Tolerance for sums of fractions of a CPU in floating point."""


@dataclass
class Bundle:
    """Free resources of one bundle."""

    cpus: float
    gpus: float

    def has_room(self, place: PlacementConfig) -> bool:
        """Whether a worker fits into the free resources."""
        return self.cpus + ROUNDING >= place.cpus and self.gpus + ROUNDING >= place.gpus


Choice = Callable[["Bundles", str, PlacementConfig], "int | None"]
"""Chooses a bundle for a worker of a role; None if none has enough resources."""


class Bundles:
    """The bundles of one pool, numbered from 0, and the workers assigned to them."""

    def __init__(self, pool: PoolConfig) -> None:
        self._pool = pool
        self._left = [Bundle(pool.cpus, float(pool.gpus)) for _ in range(pool.bundles)]
        self.assignments: dict[Worker, int] = {}
        """Worker -> its bundle."""
        self._shares: dict[Worker, PlacementConfig] = {}

    def __len__(self) -> int:
        return len(self._left)

    def assign(self, worker: Worker, place: PlacementConfig, number: int) -> None:
        """Assign a worker to a bundle, after removing it from its previous one."""
        self.leave(worker)
        self._left[number].cpus -= place.cpus
        self._left[number].gpus -= place.gpus
        self.assignments[worker], self._shares[worker] = number, place

    def leave(self, worker: Worker) -> None:
        """Free the resources of a worker; a no-op for one that is not assigned."""
        number, place = self.assignments.pop(worker, None), self._shares.pop(worker, None)
        if number is not None and place is not None:
            self._left[number].cpus += place.cpus
            self._left[number].gpus += place.gpus

    def add(self) -> int:
        """Add a bundle; returns its number."""
        self._left.append(Bundle(self._pool.cpus, float(self._pool.gpus)))
        return len(self._left) - 1

    def remove_last(self) -> None:
        """Remove the last bundle, which must be empty."""
        self._left.pop()

    def occupants(self, number: int) -> list[Worker]:
        """Workers assigned to a bundle."""
        return [worker for worker, home in self.assignments.items() if home == number]

    def room(self, place: PlacementConfig) -> list[int]:
        """Bundles with enough free resources for a worker."""
        return [number for number, left in enumerate(self._left) if left.has_room(place)]


def spread(bundles: Bundles, role: str, place: PlacementConfig) -> int | None:
    """The bundle with enough resources that has the fewest workers of the role; the first of several."""
    neighbours = [0] * len(bundles)
    for (other, _), number in bundles.assignments.items():
        neighbours[number] += other == role
    return min(bundles.room(place), key=lambda number: (neighbours[number], number), default=None)


def first_with_room(bundles: Bundles, _: str, place: PlacementConfig) -> int | None:
    """The first bundle with enough resources."""
    return next(iter(bundles.room(place)), None)


def assigned(pool: PoolConfig, placements: Mapping[str, PlacementConfig]) -> Bundles | PlacementConfig:
    """Assign all workers of the roles; returns the bundles or, if a worker does not fit, that worker's placement.

    Args:
        placements: of the roles of this pool, by section.
    """
    failed: PlacementConfig | None = None
    for choose in (spread, first_with_room):
        outcome = _assigned(pool, placements, choose)
        if isinstance(outcome, Bundles):
            return outcome
        failed = outcome
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
    """The bundle of one worker of a role."""

    role: str
    rank: int
    pool: str
    bundle: int
    """Number of the bundle in its pool."""


def worker_bundles(pools: dict[str, PoolConfig], placements: dict[str, PlacementConfig]) -> list[BundleSlot]:
    """The bundle of every worker, as `assigned` chooses it.

    Raises:
        ValueError: a worker fits into no bundle, although the pool's total resources may suffice.
    """
    slots = []
    for name, pool in pools.items():
        users = {role: place for role, place in placements.items() if place.pool == name}
        bundles = assigned(pool, users)
        if not isinstance(bundles, Bundles):
            role, place = next((role, place) for role, place in users.items() if place is bundles)
            raise ValueError(
                f"pools.{name}: its {pool.bundles} bundles of {pool.cpus:g} cpus and {pool.gpus:g} gpus have "
                f"enough resources in total, but a worker of {role} with {place.cpus:g} cpus and {place.gpus:g} gpus "
                f"fits into no single bundle; make the bundles larger or lower {role}.cpus or {role}.gpus")
        slots += [BundleSlot(role, rank, name, number) for (role, rank), number in bundles.assignments.items()]
    return slots
