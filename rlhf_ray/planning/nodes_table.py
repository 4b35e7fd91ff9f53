"""Nodes as text: what each has, and how many bundles of each pool it holds."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from rlhf_ray.config.run import PoolConfig
from rlhf_ray.planning.feasible import capacity, carries, everything, what_is_free
from rlhf_ray.planning.nodes import Node
from rlhf_ray.planning.shortage import labels_text

MOST_LINES = 24


def nodes_table(pools: Mapping[str, PoolConfig], nodes: Sequence[Node]) -> str:
    """A line for each kind of node: labels, resources (free of all), and how many bundles of each pool it holds."""
    rows = [("node", "labels", "free of all", "bundles that fit")]
    alike = groupby(sorted((_looks(pools, node), node.name) for node in nodes), key=lambda pair: pair[0])
    for looks, same in alike:
        names = [name for _, name in same]
        rows.append((names[0] if len(names) == 1 else f"{len(names)} like {names[0]}", *looks))
    more = [f"... and {len(rows) - MOST_LINES} other kinds of nodes"] if len(rows) > MOST_LINES else []
    rows = rows[:MOST_LINES]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(["  " + line for line in [*lines, *more]])


def _looks(pools: Mapping[str, PoolConfig], node: Node) -> tuple[str, str, str]:
    """What makes one node like another."""
    labels = labels_text({k: v for k, v in sorted(node.labels.items()) if k != "ray.io/node-id"})
    kinds = [kind for kind in ("CPU", "GPU", *sorted(node.custom)) if node.resources.get(kind)]
    amounts = ", ".join(f"{node.free.get(kind, 0.0):g} of {node.resources[kind]:g} {kind}" for kind in kinds)
    fits = ", ".join(_fits(name, pool, node) for name, pool in pools.items())
    return labels or "-", amounts or "nothing", fits


def _fits(name: str, pool: PoolConfig, node: Node) -> str:
    if not carries(node.labels, pool.labels):
        return f"{name}: other labels"
    free, all_ = capacity(pool, node, what_is_free), capacity(pool, node, everything)
    return f"{name}: {free} now" + (f", {all_} when empty" if all_ > free else "")
