"""Bundles of pools on nodes: how many fit by labels, resources and strategy, and which bundle lies on which node.

Ray does not report that a bundle can never be placed: it waits for a node that may join. A label that no node carries,
or a bundle larger than any node, would make a run wait until its deadline, although the answer is known at once. Ray
may choose other nodes of the same kind than this module does.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlhf_ray.config.run import PoolConfig
from rlhf_ray.planning.node_spec import Node

ROUNDING = 1e-6

Amounts = Callable[[Node], Mapping[str, float]]
"""Which resources of a node count: all of them, or the free ones."""


def all_resources(node: Node) -> Mapping[str, float]:
    """All resources of a node, whether in use or not."""
    return node.resources


def free_resources(node: Node) -> Mapping[str, float]:
    """The resources of a node that are not reserved."""
    return node.free


def matches_labels(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether a node's labels match a selector, by Ray's rules: "v" and "in(v, w)" require a label with such a value,
    "!v" and "!in(v, w)" forbid it."""
    return all(_agrees(labels.get(key), wanted) for key, wanted in selector.items())


def _agrees(value: str | None, wanted: str) -> bool:
    negated, listed = re.fullmatch(r"(!?)(.*)", wanted.strip(), re.S).groups()  # type: ignore[union-attr]
    inside = re.fullmatch(r"(?:in)?\((.*)\)", listed)
    values = [v.strip() for v in inside[1].split(",")] if inside else [listed]
    return (value in values) is not bool(negated)


def node_capacity(pool: PoolConfig, node: Node, amounts: Amounts = all_resources) -> int:
    """Bundles of a pool that fit on a node; 0 if its labels do not match."""
    return holds(pool, node.labels, amounts(node))


def holds(pool: PoolConfig, labels: Mapping[str, str], has: Mapping[str, float]) -> int:
    """Bundles of a pool that fit into these resources of a node with these labels."""
    if not matches_labels(labels, pool.labels):
        return 0
    return min(int(has.get(kind, 0.0) / amount + ROUNDING) for kind, amount in pool.bundle.items())


def pool_capacity(pool: PoolConfig, nodes: Sequence[Node], amounts: Amounts = all_resources) -> int:
    """Bundles of a pool that fit on all nodes together, by its strategy and without other pools."""
    held = [node_capacity(pool, node, amounts) for node in nodes]
    if pool.strategy == "STRICT_PACK":
        return max(held, default=0)
    return sum(min(h, 1) for h in held) if pool.strategy == "STRICT_SPREAD" else sum(held)


MAX_TRIES = 20_000
"""Arrangements that are tried before the search gives up without an answer."""
MAX_SEARCH_SIZE = 200
"""Nodes times pools up to which all arrangements are tried. In larger clusters pools seldom compete for nodes, and a
definite answer would take long."""


@dataclass(frozen=True)
class Arrangement:
    """Bundles on nodes."""

    shares: Mapping[str, Sequence[int]]
    """Bundles on each node, by pool, in the order in which the pools were placed."""
    missing: Mapping[str, int]
    """Bundles that were not placed, by pool; empty if all were."""
    impossible: bool = False
    """Whether it is certain that no arrangement holds all bundles. If not, the search may have missed one."""


def arrange(pools: Mapping[str, PoolConfig], nodes: Sequence[Node], amounts: Amounts = all_resources) -> Arrangement:
    """Place each pool on the nodes by its strategy, the most constrained pools first; if bundles are left over, search
    all arrangements."""
    order = sorted(pools, key=lambda name: _choice(pools[name], nodes))
    first = _one_by_one({name: pools[name] for name in order}, nodes, amounts)
    if not first.missing:
        return first
    if any(pool_capacity(pool, nodes, amounts) < pool.bundles for pool in pools.values()):
        return Arrangement(first.shares, first.missing, impossible=True)
    if len(nodes) * len(pools) > MAX_SEARCH_SIZE:
        return first
    search = _Search(nodes, amounts)
    if search.places([pools[name] for name in order]):
        return Arrangement(dict(zip(order, search.shares, strict=True)), {})
    return Arrangement(first.shares, first.missing, impossible=search.tries <= MAX_TRIES)


def _choice(pool: PoolConfig, nodes: Sequence[Node]) -> tuple[float, ...]:
    """Sort key: the most constrained pools first, and of those the largest."""
    return (sum(matches_labels(node.labels, pool.labels) for node in nodes), -len(pool.resources),
            -float(pool.strategy.startswith("STRICT")), -pool.gpus, -pool.cpus)


def _one_by_one(pools: Mapping[str, PoolConfig], nodes: Sequence[Node], amounts: Amounts) -> Arrangement:
    left = [dict(amounts(node)) for node in nodes]
    shares, missing = {}, {}
    for name, pool in pools.items():
        shares[name] = _distribute(pool, [holds(pool, node.labels, has) for node, has in zip(nodes, left, strict=True)])
        for has, count in zip(left, shares[name], strict=True):
            _reserve(has, pool, count)
        if sum(shares[name]) < pool.bundles:
            missing[name] = pool.bundles - sum(shares[name])
    return Arrangement(shares, missing)


def _distribute(pool: PoolConfig, held: Sequence[int]) -> list[int]:
    """Bundles of a pool on each node, given how many fit on each; fewer than `pool.bundles` if not all fit."""
    if pool.strategy == "STRICT_PACK":
        home = next((number for number, most in enumerate(held) if most >= pool.bundles), None)
        return [pool.bundles * (number == home) for number in range(len(held))]
    most_each = 1 if pool.strategy.endswith("SPREAD") else pool.bundles
    shares, left = [0] * len(held), pool.bundles
    while left and any(share < most for share, most in zip(shares, held, strict=True)):
        for number, most in enumerate(held):
            more = min(most_each, most - shares[number], left)
            shares[number], left = shares[number] + more, left - more
        if pool.strategy == "STRICT_SPREAD":
            break
    return shares


def _reserve(left: dict[str, float], pool: PoolConfig, count: int) -> None:
    for kind, amount in pool.bundle.items():
        left[kind] = left.get(kind, 0.0) - count * amount


class _Search:
    """Depth-first search over the number of bundles of each pool on each node."""

    def __init__(self, nodes: Sequence[Node], amounts: Amounts) -> None:
        self._labels, self._left = [node.labels for node in nodes], [dict(amounts(node)) for node in nodes]
        self.tries = 0
        self.shares: list[list[int]] = []
        """Bundles on each node, for each pool placed so far."""

    def places(self, pools: Sequence[PoolConfig]) -> bool:
        """Place all bundles of these pools in the remaining resources; whether that worked."""
        if not pools:
            return True
        self.shares.append([0] * len(self._left))
        if self._share(pools, pools[0].bundles, 0):
            return True
        self.shares.pop()
        return False

    def _share(self, pools: Sequence[PoolConfig], bundles: int, node: int) -> bool:
        """Place the remaining bundles of the first pool on nodes from `node` on, then the pools after it."""
        self.tries += 1
        if self.tries > MAX_TRIES:
            return False
        if bundles == 0:
            return self.places(pools[1:])
        if node == len(self._left):
            return False
        return any(self._with(pools, bundles, node, count) for count in self._counts(pools[0], bundles, node))

    def _counts(self, pool: PoolConfig, bundles: int, node: int) -> Iterator[int]:
        """Numbers of bundles that a node may take, the largest first."""
        most = min(bundles, holds(pool, self._labels[node], self._left[node]))
        if pool.strategy == "STRICT_PACK":
            yield from (bundles, 0) if most == bundles else (0,)
        else:
            yield from range(min(most, 1) if pool.strategy == "STRICT_SPREAD" else most, -1, -1)

    def _with(self, pools: Sequence[PoolConfig], bundles: int, node: int, count: int) -> bool:
        before, shares = dict(self._left[node]), self.shares[-1]
        _reserve(self._left[node], pools[0], count)
        shares[node] = count
        if self._share(pools, bundles - count, node + 1):
            return True
        self._left[node], shares[node] = before, 0
        return False
