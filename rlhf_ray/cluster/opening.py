"""Whether pools can be placed at all: what the nodes could never hold is refused, what is only busy is waited for."""

import asyncio
from collections.abc import Callable, Iterable, Mapping

from rlhf_ray.cluster.nodes import present_nodes
from rlhf_ray.config.run import PoolConfig
from rlhf_ray.errors import ClusterError
from rlhf_ray.planning.bundle_packing import arrange
from rlhf_ray.planning.placement_errors import asked_for, nodes_table, why_not

SAY_AFTER_S = 5.0
"""A wait for pools as long as that is told of."""


def require_feasible(pools: Mapping[str, PoolConfig]) -> None:
    """Refuse pools that the present nodes could not hold even if nobody else used them.

    Raises:
        ClusterError: with a line for each pool that is at fault, and a table of the nodes.
    """
    nodes = present_nodes()
    found = arrange(pools, nodes)
    if found.never:
        raise ClusterError("\n".join([*why_not(pools, nodes, found), nodes_table(pools, nodes),
                                      "(if such nodes are about to join, cluster.nodes_may_join=true waits for them)"]))


async def placed(waiting: Mapping[str, "asyncio.Future[None]"], timeout_s: float, say: Callable[[str], None]) -> None:
    """Wait for all pools within one deadline; what is waited for is told once, when it takes long."""
    _, late = await asyncio.wait(waiting.values(), timeout=min(SAY_AFTER_S, timeout_s))
    if late:
        say(f"waiting for room for {_listed(name for name, task in waiting.items() if task in late)} until others give "
            f"it back, {timeout_s:g} s at most (cluster.start_timeout_s)")
        _, late = await asyncio.wait(late, timeout=max(0.0, timeout_s - SAY_AFTER_S))
    if late:
        raise TimeoutError
    for task in waiting.values():
        task.result()


def not_in_time(pools: Mapping[str, PoolConfig], late: list[str], timeout_s: float) -> str:
    """What to say of pools that were late: what they ask for, and what the nodes have."""
    nodes = present_nodes()
    return "\n".join([
        f"{_listed(late)} found no place within {timeout_s:g} s (cluster.start_timeout_s); what was reserved is given "
        "back. Others may be using the nodes (`ray status` tells):",
        *(asked_for(name, pools[name]) for name in late),
        nodes_table({name: pools[name] for name in late}, nodes),
    ])


def _listed(names: Iterable[str]) -> str:
    return " and ".join(f"pool {name!r}" for name in names)
