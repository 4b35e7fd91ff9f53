"""Pools as placement groups: all opened or none, with one deadline, and each worker's bundle in them.

The bundle of a worker is chosen here (`config.bundles`) and not left to Ray, which considers one worker at a time.
Pools that the nodes could never hold are refused at once; the others wait for resources in use.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from rlhf_ray.cluster.nodes import present_nodes
from rlhf_ray.config.bundle_assignment import Bundles, assigned, spread
from rlhf_ray.config.run import ClusterConfig, PlacementConfig, PoolConfig
from rlhf_ray.errors import ClusterError
from rlhf_ray.planning.bundle_packing import arrange, free_resources
from rlhf_ray.planning.placement_errors import explain_shortage, nodes_table, pool_request


class Seat(NamedTuple):
    """Where a worker runs."""

    pool: str
    bundle: int
    """Index of the bundle in its pool."""
    group: PlacementGroup
    slot: int
    """Index of the bundle in its placement group."""


class Pools:
    """The run's placement groups by name. Call `open` before workers are spawned, and `close` after they are gone."""

    def __init__(self, configs: Mapping[str, PoolConfig], placements: Mapping[str, PlacementConfig] | None = None,
                 cluster: ClusterConfig | None = None) -> None:
        """`placements`: of the roles, by section. Workers of other roles take a free bundle when they are spawned."""
        self.configs, self._cluster = dict(configs), cluster or ClusterConfig()
        self._groups: dict[str, list[tuple[PlacementGroup, int]]] = {}
        """By pool, for each of its bundles: the placement group, and the index in it."""
        self._bundles = {name: _assigned(config, name, placements or {}) for name, config in configs.items()}
        self._grown = 0
        """Number of bundles added so far. Each placement group needs a name of its own, since Ray frees the name of a
        removed one later."""

    async def open(self, timeout_s: float, say: Callable[[str], None] | None = None) -> None:
        """Reserve all pools, or none of them.

        Args:
            say: called with a message when the wait takes long.

        Raises:
            ClusterError: the nodes could never hold the pools, or did not in time. The message lists what each pool
                asks for, what each node has, what fits where and what to change.
        """
        if not self._cluster.nodes_may_join:
            await asyncio.to_thread(require_feasible, self.configs)
        for name, config in self.configs.items():
            group = _reserved(name, config, config.bundles)
            self._groups[name] = [(group, index) for index in range(config.bundles)]
        waiting = {name: asyncio.ensure_future(_ready(places[0][0])) for name, places in self._groups.items()}
        try:
            await placed(waiting, timeout_s, say or (lambda _: None))
        except TimeoutError:
            late = [name for name, task in waiting.items() if not task.done()]
            message = await asyncio.to_thread(not_in_time, self.configs, late, timeout_s)
            raise ClusterError(message) from None
        finally:
            if not all(_is_well(task) for task in waiting.values()):
                for task in waiting.values():
                    task.cancel()
                self.close()

    def seat(self, name: str, rank: int, place: PlacementConfig) -> Seat:
        """Where a worker runs; a worker without a bundle is assigned one.

        Raises:
            ClusterError: no bundle has enough left for it.
        """
        bundles, worker = self._bundles[place.pool], (name, rank)
        number = bundles.assignments.get(worker)
        if number is None:
            number = spread(bundles, name, place)
            if number is None:
                raise ClusterError(f"pools.{place.pool} has no room for {name}/{rank}: none of its {len(bundles)} "
                                   f"bundles has {place.cpus:g} cpus and {place.gpus:g} gpus left")
            bundles.assign(worker, place, number)
        return Seat(place.pool, number, *self._groups[place.pool][number])

    def has_room(self, place: PlacementConfig) -> bool:
        """Whether one more worker fits into a bundle."""
        return bool(self._bundles[place.pool].room(place))

    async def leave_lost_nodes(self, name: str, rank: int, place: PlacementConfig) -> None:
        """Assign another bundle to a worker whose own was on a lost node, if one has room. Otherwise the worker keeps
        its bundle, and starts when Ray has placed that bundle on another node."""
        bundles, worker = self._bundles[place.pool], (name, rank)
        gone = await asyncio.to_thread(self._lost_bundles, place.pool)
        if bundles.assignments.get(worker) not in gone:
            return
        other = next((number for number in bundles.room(place) if number not in gone), None)
        if other is not None:
            bundles.assign(worker, place, other)

    async def grow(self, name: str, timeout_s: float) -> None:
        """Add one bundle to a pool, in a placement group of its own.

        Raises:
            ClusterError: the cluster has no free resources for it now, and none came in time where nodes may join.
        """
        one = {name: self.configs[name].model_copy(update={"bundles": 1})}
        nodes = await asyncio.to_thread(present_nodes)
        if not self._cluster.nodes_may_join and arrange(one, nodes, free_resources).missing:
            raise ClusterError(f"pools.{name} is full, and the cluster has no room for one more of its bundles now:\n"
                               + nodes_table(one, nodes))
        self._grown += 1
        group = _reserved(f"{name} ({self._grown})", one[name], 1)
        try:
            await asyncio.wait_for(_ready(group), timeout_s)
        except BaseException as error:
            remove_placement_group(group)
            if not isinstance(error, TimeoutError):
                raise
            raise ClusterError(f"pools.{name} is full, and no room for one more of its bundles was found within "
                               f"{timeout_s:g} s:\n{nodes_table(one, nodes)}") from None
        self._bundles[name].add()
        self._groups[name].append((group, 0))

    def leave(self, name: str, rank: int, place: PlacementConfig) -> None:
        """Free the bundle of a worker that is gone permanently. Added bundles at the pool's end that are now empty are
        given back."""
        bundles, groups = self._bundles[place.pool], self._groups[place.pool]
        bundles.leave((name, rank))
        while len(groups) > self.configs[place.pool].bundles and not bundles.occupants(len(groups) - 1):
            remove_placement_group(groups.pop()[0])
            bundles.remove_last()

    def close(self) -> None:
        """Give all resources back; Ray kills workers that are still inside."""
        for group in {group.id: group for places in self._groups.values() for group, _ in places}.values():
            remove_placement_group(group)
        self._groups.clear()

    def nodes_of(self, name: str) -> set[str]:
        """Ids of the nodes that hold bundles of a pool now."""
        return set(self._bundle_nodes(name))

    def _bundle_nodes(self, pool: str) -> list[str]:
        """The node id of each bundle of a pool."""
        tables: dict[Any, Mapping[int, str]] = {}
        for group, _ in self._groups[pool]:
            if group.id not in tables:
                tables[group.id] = placement_group_table(group)["bundles_to_node_id"]
        return [tables[group.id].get(index, "") for group, index in self._groups[pool]]

    def _lost_bundles(self, pool: str) -> set[int]:
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return {number for number, node in enumerate(self._bundle_nodes(pool)) if node not in alive}


def _assigned(pool: PoolConfig, name: str, placements: Mapping[str, PlacementConfig]) -> Bundles:
    """The pool's bundles, with the workers whose placements are known assigned to them."""
    bundles = assigned(pool, {role: place for role, place in placements.items() if place.pool == name})
    return bundles if isinstance(bundles, Bundles) else Bundles(pool)  # the configuration's checks refuse that case


def _reserved(name: str, pool: PoolConfig, bundles: int) -> PlacementGroup:
    # Ray treats a space after a comma as a part of the next value.
    selector = {label: wanted.replace(" ", "") for label, wanted in pool.labels.items()}
    labels = {"bundle_label_selector": [selector] * bundles} if selector else {}
    return placement_group([pool.bundle] * bundles, strategy=pool.strategy, name=name, **labels)


async def _ready(group: PlacementGroup) -> None:
    await group.ready()


def _is_well(task: "asyncio.Future[None]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


SAY_AFTER_S = 5.0
"""Seconds after which a wait for pools is announced."""


def require_feasible(pools: Mapping[str, PoolConfig]) -> None:
    """Refuse pools that the present nodes could not hold even if they were idle.

    Raises:
        ClusterError: with a line for each such pool, and a table of the nodes.
    """
    nodes = present_nodes()
    packing = arrange(pools, nodes)
    if packing.impossible:
        raise ClusterError("\n".join([*explain_shortage(pools, nodes, packing), nodes_table(pools, nodes),
                                      "(if such nodes are about to join, set cluster.nodes_may_join=true)"]))


async def placed(waiting: Mapping[str, "asyncio.Future[None]"], timeout_s: float, say: Callable[[str], None]) -> None:
    """Wait for all pools within one deadline; a long wait is announced once, with the pools it is for."""
    _, late = await asyncio.wait(waiting.values(), timeout=min(SAY_AFTER_S, timeout_s))
    if late:
        say(f"waiting for room for {_listed(name for name, task in waiting.items() if task in late)} until others free "
            f"it, {timeout_s:g} s at most (cluster.start_timeout_s)")
        _, late = await asyncio.wait(late, timeout=max(0.0, timeout_s - SAY_AFTER_S))
    if late:
        raise TimeoutError
    for task in waiting.values():
        task.result()


def not_in_time(pools: Mapping[str, PoolConfig], late: list[str], timeout_s: float) -> str:
    """The message about pools that were late: what they ask for, and what the nodes have."""
    nodes = present_nodes()
    return "\n".join([
        f"{_listed(late)} found no place within {timeout_s:g} s (cluster.start_timeout_s); the other pools were "
        "released. Other jobs may be using the nodes (`ray status` lists what is in use):",
        *(pool_request(name, pools[name]) for name in late),
        nodes_table({name: pools[name] for name in late}, nodes),
    ])


def _listed(names: Iterable[str]) -> str:
    return " and ".join(f"pool {name!r}" for name in names)
