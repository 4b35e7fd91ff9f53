"""How many bundles of a pool nodes hold, by labels, amounts and strategy. Which lies where is `arrangement`'s."""

import re
from collections.abc import Callable, Mapping, Sequence

from rlhf_ray.config.run import PoolConfig
from rlhf_ray.planning.nodes import Node

ROUNDING = 1e-6

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
    return holds(pool, node.labels, amounts(node))


def holds(pool: PoolConfig, labels: Mapping[str, str], has: Mapping[str, float]) -> int:
    """Bundles of a pool that a node with these labels has room for in these amounts."""
    if not carries(labels, pool.labels):
        return 0
    return min(int(has.get(kind, 0.0) / amount + ROUNDING) for kind, amount in pool.bundle.items())


def room_for(pool: PoolConfig, nodes: Sequence[Node], amounts: Amounts = everything) -> int:
    """Bundles of a pool that all nodes hold together by its strategy, were it alone there."""
    held = [capacity(pool, node, amounts) for node in nodes]
    if pool.strategy == "STRICT_PACK":
        return max(held, default=0)
    return sum(min(h, 1) for h in held) if pool.strategy == "STRICT_SPREAD" else sum(held)
