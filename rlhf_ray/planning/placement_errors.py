"""Messages about pools that do not fit on nodes: what each requests, what the nodes have, and which field to change."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from rlhf_ray.config.run import PoolConfig
from rlhf_ray.planning.bundle_packing import (
    Arrangement,
    all_resources,
    free_resources,
    matches_labels,
    node_capacity,
    pool_capacity,
)
from rlhf_ray.planning.node_spec import Node


def pool_request(name: str, pool: PoolConfig) -> str:
    """The request of a pool in words."""
    on = f" on nodes labelled {labels_text(pool.labels)}" if pool.labels else ""
    return f"pool {name!r} asks for {_bundles(pool.bundles)} of {amounts_text(pool.bundle)}{on} ({pool.strategy})"


def amounts_text(amounts: Mapping[str, float]) -> str:
    """"2 CPU, 1 GPU"."""
    return ", ".join(f"{amount:g} {kind}" for kind, amount in amounts.items()) or "nothing"


def labels_text(labels: Mapping[str, str]) -> str:
    """"kind=gpu, zone=a"."""
    return ", ".join(f"{key}={value}" for key, value in labels.items())


def explain_shortage(pools: Mapping[str, PoolConfig], nodes: Sequence[Node], arrangement: Arrangement) -> list[str]:
    """A message for each pool that does not fit on these nodes alone or, if each fits alone, one message about all of
    them; empty if everything was placed.

    Args:
        arrangement: of the pools on these nodes, with all resources counted.
    """
    if not arrangement.missing:
        return []
    alone = [_alone(name, pool, nodes) for name, pool in pools.items() if pool_capacity(pool, nodes) < pool.bundles]
    return alone or [_together(pools, arrangement)]


def _alone(name: str, pool: PoolConfig, nodes: Sequence[Node]) -> str:
    """Message about a pool that would not fit even on empty nodes: its request, the reason, and what to change."""
    asked = pool_request(name, pool)
    labelled = [node for node in nodes if matches_labels(node.labels, pool.labels)]
    if not labelled:
        return (f"{asked}, but none of the {len(nodes)} nodes has these labels: start nodes with `ray start "
                f"--labels=\"{_as_option(pool.labels)}\"`, or correct pools.{name}.labels")
    if not any(node_capacity(pool, node) for node in labelled):
        such = "such " if pool.labels else ""
        return f"{asked}, but no {such}node is large enough: {_too_large(name, pool, labelled)}"
    fitting = pool_capacity(pool, nodes)
    where = {"STRICT_PACK": "the largest node holds", "STRICT_SPREAD": "with one per node, the nodes hold"}
    return (f"{asked}, but {where.get(pool.strategy, 'all such nodes together hold')} only {fitting}: "
            f"lower pools.{name}.bundles to {fitting} or add nodes")


def _too_large(name: str, pool: PoolConfig, nodes: Sequence[Node]) -> str:
    """Resources that the nodes lack for a single bundle, and what to change."""
    most = {kind: max(node.resources.get(kind, 0.0) for node in nodes) for kind in pool.bundle}
    short = {kind: amount for kind, amount in pool.bundle.items() if most[kind] < amount}
    if not short:
        return (f"none has all of these resources. Make its bundles smaller (pools.{name}) and raise "
                f"pools.{name}.bundles, or add larger nodes")
    lacking = "; ".join(f"{amount:g} {kind} needed, {most[kind]:g} on the largest node"
                        for kind, amount in short.items())
    return f"{lacking}. {' and '.join(_less(name, kind, most[kind]) for kind in short)}, or add larger nodes"


def _less(name: str, kind: str, most: float) -> str:
    if kind not in ("CPU", "GPU"):
        return f"Correct pools.{name}.resources, start nodes with {kind} (`ray start --resources`)"
    raised = f" at most and raise pools.{name}.bundles" if most else ""
    return f"Set pools.{name}.{kind.lower()}s to {most:g}{raised}"


def _together(pools: Mapping[str, PoolConfig], arrangement: Arrangement) -> str:
    asked = "; ".join(pool_request(name, pool) for name, pool in pools.items())
    rest = [f"{pools[name].bundles - missing} of the {_bundles(pools[name].bundles)} of pool {name!r}"
            for name, missing in arrangement.missing.items()]
    fields = " or ".join(f"pools.{name}.bundles" for name in arrangement.missing)
    return (f"each pool fits on these nodes alone, but not all together: {asked}. With the others placed, the "
            f"nodes hold only {' and '.join(rest)}: lower {fields}, make bundles smaller, or add nodes")


def _as_option(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value.lstrip('!')}" for key, value in labels.items())


def _bundles(count: int) -> str:
    return f"{count} bundle{'' if count == 1 else 's'}"


MOST_LINES = 24


def nodes_table(pools: Mapping[str, PoolConfig], nodes: Sequence[Node]) -> str:
    """A line per kind of node: labels, resources (free of all), and how many bundles of each pool fit."""
    rows = [("node", "labels", "free of all", "bundles that fit")]
    groups = groupby(sorted((_description(pools, node), node.name) for node in nodes), key=lambda pair: pair[0])
    for description, same in groups:
        names = [name for _, name in same]
        rows.append((names[0] if len(names) == 1 else f"{len(names)} like {names[0]}", *description))
    more = [f"... and {len(rows) - MOST_LINES} other kinds of nodes"] if len(rows) > MOST_LINES else []
    rows = rows[:MOST_LINES]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(["  " + line for line in [*lines, *more]])


def _description(pools: Mapping[str, PoolConfig], node: Node) -> tuple[str, str, str]:
    """Labels, resources and fitting bundles of a node; nodes for which they are equal share a line."""
    labels = labels_text({k: v for k, v in sorted(node.labels.items()) if k != "ray.io/node-id"})
    kinds = [kind for kind in ("CPU", "GPU", *sorted(node.custom)) if node.resources.get(kind)]
    amounts = ", ".join(f"{node.free.get(kind, 0.0):g} of {node.resources[kind]:g} {kind}" for kind in kinds)
    fits = ", ".join(_fits(name, pool, node) for name, pool in pools.items())
    return labels or "-", amounts or "nothing", fits


def _fits(name: str, pool: PoolConfig, node: Node) -> str:
    if not matches_labels(node.labels, pool.labels):
        return f"{name}: other labels"
    free, all_ = node_capacity(pool, node, free_resources), node_capacity(pool, node, all_resources)
    return f"{name}: {free} now" + (f", {all_} when empty" if all_ > free else "")
