"""Pools against nodes as text: what each pool asks for, what each node has, what fits where and what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from rlhf_ray.config.run import PoolConfig
from rlhf_ray.planning.feasible import Node, capacity, carries, everything, room_for, what_is_free

INTERNAL = ("node:", "memory", "object_store_memory", "bundle_group")
"""Beginnings of the names of resources that Ray keeps for itself."""
MOST_LINES = 24


def asked_for(name: str, pool: PoolConfig) -> str:
    """A pool's request in words."""
    on = f" on nodes labelled {labels_text(pool.labels)}" if pool.labels else ""
    return f"pool {name!r} asks for {_bundles(pool.bundles)} of {amounts_text(pool.bundle)}{on} ({pool.strategy})"


def amounts_text(amounts: Mapping[str, float]) -> str:
    """"2 CPU, 1 GPU"."""
    return ", ".join(f"{amount:g} {kind}" for kind, amount in amounts.items()) or "nothing"


def labels_text(labels: Mapping[str, str]) -> str:
    """"kind=gpu, zone=a"."""
    return ", ".join(f"{key}={value}" for key, value in labels.items())


def why_never(pools: Mapping[str, PoolConfig], nodes: Sequence[Node]) -> list[str]:
    """Of each pool that these nodes could not hold were they empty: what it asks for, why not, and what to change."""
    return [_why_never(name, pool, nodes) for name, pool in pools.items() if room_for(pool, nodes) < pool.bundles]


def _why_never(name: str, pool: PoolConfig, nodes: Sequence[Node]) -> str:
    asked = asked_for(name, pool)
    labelled = [node for node in nodes if carries(node.labels, pool.labels)]
    if not labelled:
        return (f"{asked}, and no node carries such labels: start nodes with `ray start "
                f"--labels=\"{_as_option(pool.labels)}\"`, or correct pools.{name}.labels")
    lacking = _lacking(pool, labelled)
    if lacking:
        return f"{asked}, and no {'such ' if pool.labels else ''}node is that large: {lacking}. {_advice(name, pool)}"
    room = room_for(pool, nodes)
    where = {"STRICT_PACK": "on the one node that has most room", "STRICT_SPREAD": "on as many nodes, one on each"}
    return (f"{asked}, and there is room for {room} {where.get(pool.strategy, 'on all such nodes together')}: "
            f"lower pools.{name}.bundles to {room} or add nodes")


def _lacking(pool: PoolConfig, nodes: Sequence[Node]) -> str:
    """What the nodes lack for a single bundle; empty where one of them has all of it."""
    if any(capacity(pool, node) for node in nodes):
        return ""
    most = {kind: max(node.resources.get(kind, 0.0) for node in nodes) for kind in pool.bundle}
    short = [f"{amount:g} {kind} needed, {most[kind]:g} the most that one has"
             for kind, amount in pool.bundle.items() if most[kind] < amount]
    return "; ".join(short) or "none has all of it at once"


def _advice(name: str, pool: PoolConfig) -> str:
    fields = ["cpus" * ("CPU" in pool.bundle), "gpus" * ("GPU" in pool.bundle), "resources" * bool(pool.resources)]
    return f"Make its bundles smaller (pools.{name}.{' and '.join(filter(None, fields))}), or add larger nodes"


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
    kinds = [kind for kind in sorted(node.resources) if not kind.startswith(INTERNAL)]
    amounts = ", ".join(f"{node.free.get(kind, 0.0):g} of {node.resources[kind]:g} {kind}" for kind in kinds)
    fits = ", ".join(_fits(name, pool, node) for name, pool in pools.items())
    return labels or "-", amounts or "nothing", fits


def _fits(name: str, pool: PoolConfig, node: Node) -> str:
    if not carries(node.labels, pool.labels):
        return f"{name}: other labels"
    free, all_ = capacity(pool, node, what_is_free), capacity(pool, node, everything)
    return f"{name}: {free} now" + (f", {all_} when empty" if all_ > free else "")


def _as_option(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value.lstrip('!')}" for key, value in labels.items())


def _bundles(count: int) -> str:
    return f"{count} bundle{'' if count == 1 else 's'}"
