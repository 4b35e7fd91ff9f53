"""Would the pools of a run find their places on these nodes? Arithmetic; what nodes there are is others' to find out.

Ray itself never says that a bundle cannot be placed: it waits for a node that may join. A label that nobody carries,
or a bundle larger than any node, would let a run wait until its deadline for what can be known at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_ray.config.run import PoolConfig

ROUNDING = 1e-6
EFFORT = 20_000
"""Arrangements that are tried before a set of pools counts as one that may fit."""
DEEPEST = 200
"""Nodes times pools, up to which arrangements are tried at all: in larger clusters pools are seldom in each other's
way, and an answer that is sure would take long."""


@dataclass(frozen=True)
class Node:
    """One machine of a cluster."""

    name: str
    """Its address, for people."""
    resources: Mapping[str, float]
    """All that it has, by Ray's names (CPU, GPU, custom ones)."""
    labels: Mapping[str, str] = field(default_factory=dict)
    free: Mapping[str, float] = field(default_factory=dict)
    """What nobody has reserved of it; nothing for a node that is only planned."""
    id: str = ""
    """Ray's."""


Amounts = Callable[[Node], Mapping[str, float]]
"""Which amounts of a node count: all, or the free ones."""


def everything(node: Node) -> Mapping[str, float]:
    """All that a node has, whoever uses it now."""
    return node.resources


def what_is_free(node: Node) -> Mapping[str, float]:
    """What nobody has reserved."""
    return node.free


def carries(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether a node with these labels is one that a selector means. By Ray's rules: "v" and "in(v, w)" ask for a label
    with such a value, "!v" and "!in(v, w)" for none with it."""
    return all(_agrees(labels.get(key), wanted) for key, wanted in selector.items())


def _agrees(value: str | None, wanted: str) -> bool:
    negated, listed = re.fullmatch(r"(!?)(.*)", wanted.strip(), re.S).groups()  # type: ignore[union-attr]
    inside = re.fullmatch(r"(?:in)?\((.*)\)", listed)
    values = [v.strip() for v in inside[1].split(",")] if inside else [listed]
    return (value in values) is not bool(negated)


def capacity(pool: PoolConfig, node: Node, amounts: Amounts = everything) -> int:
    """Bundles of a pool that a node holds by itself; 0 where its labels are others."""
    if not carries(node.labels, pool.labels):
        return 0
    has = amounts(node)
    return min(int(has.get(kind, 0.0) / amount + ROUNDING) for kind, amount in pool.bundle.items())


def room_for(pool: PoolConfig, nodes: Sequence[Node], amounts: Amounts = everything) -> int:
    """Bundles of a pool that all nodes hold together by its strategy, were it alone there."""
    held = [capacity(pool, node, amounts) for node in nodes]
    if pool.strategy == "STRICT_PACK":
        return max(held, default=0)
    return sum(min(h, 1) for h in held) if pool.strategy == "STRICT_SPREAD" else sum(held)


def fit_together(pools: Mapping[str, PoolConfig], nodes: Sequence[Node], amounts: Amounts = everything) -> bool:
    """Whether some arrangement holds all pools; true, too, when that is not known (see `EFFORT` and `DEEPEST`)."""
    if any(room_for(pool, nodes, amounts) < pool.bundles for pool in pools.values()):
        return False
    if len(pools) == 1 or len(nodes) * len(pools) > DEEPEST:
        return True
    left = [dict(amounts(node)) for node in nodes]
    # Who has the least choice comes first, and of those the largest.
    order = sorted(pools.values(), key=lambda pool: (sum(carries(n.labels, pool.labels) for n in nodes),
                                                     *(-pool.bundle.get(kind, 0.0) for kind in ("GPU", "CPU"))))
    search = _Search([node.labels for node in nodes], left)
    return search.places(order)


class _Search:
    """Depth first over the number of bundles that each node takes of each pool."""

    def __init__(self, labels: Sequence[Mapping[str, str]], left: list[dict[str, float]]) -> None:
        self._labels, self._left, self._tries = labels, left, 0

    def places(self, pools: Sequence[PoolConfig]) -> bool:
        """Whether the remaining pools fit into what is left."""
        return not pools or self._shares(pools, pools[0].bundles, 0)

    def _shares(self, pools: Sequence[PoolConfig], bundles: int, node: int) -> bool:
        """Whether the first pool's remaining bundles fit on nodes from `node` on, and the other pools after them."""
        self._tries += 1
        if bundles == 0 or self._tries > EFFORT:
            return self._tries > EFFORT or self.places(pools[1:])
        if node == len(self._left):
            return False
        return any(self._with(pools, bundles, node, count) for count in self._counts(pools[0], bundles, node))

    def _counts(self, pool: PoolConfig, bundles: int, node: int) -> Iterator[int]:
        """How many bundles a node may take, the most first."""
        as_node = Node("", self._left[node], self._labels[node])
        most = min(bundles, capacity(pool, as_node))
        if pool.strategy == "STRICT_PACK":
            yield from (bundles, 0) if most == bundles else (0,)
        else:
            yield from range(min(most, 1) if pool.strategy == "STRICT_SPREAD" else most, -1, -1)

    def _with(self, pools: Sequence[PoolConfig], bundles: int, node: int, count: int) -> bool:
        before = dict(self._left[node])
        for kind, amount in pools[0].bundle.items():
            self._left[node][kind] = before.get(kind, 0.0) - count * amount
        if self._shares(pools, bundles - count, node + 1):
            return True
        self._left[node] = before
        return False
