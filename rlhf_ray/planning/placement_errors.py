"""Why pools do not fit on nodes, in words: what each asks for, what there is, and which field to change to what."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from rlhf_ray.config.run import PoolConfig
from rlhf_ray.planning.bundle_packing import Arrangement, capacity, carries, everything, room_for, what_is_free
from rlhf_ray.planning.nodes import Node


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


def why_not(pools: Mapping[str, PoolConfig], nodes: Sequence[Node], found: Arrangement) -> list[str]:
    """A sentence for each pool that these nodes cannot hold by itself or, where each fits alone, one for all of them;
    nothing where all have found a place.

    Args:
        found: the pools on these nodes, by all that these have.
    """
    if not found.missing:
        return []
    alone = [_alone(name, pool, nodes) for name, pool in pools.items() if room_for(pool, nodes) < pool.bundles]
    return alone or [_together(pools, found)]


def _alone(name: str, pool: PoolConfig, nodes: Sequence[Node]) -> str:
    """Of a pool that these nodes could not hold were they empty: what it asks for, why not, and what to change."""
    asked = asked_for(name, pool)
    labelled = [node for node in nodes if carries(node.labels, pool.labels)]
    if not labelled:
        return (f"{asked}, and none of the {len(nodes)} nodes carries such labels: start nodes with `ray start "
                f"--labels=\"{_as_option(pool.labels)}\"`, or correct pools.{name}.labels")
    if not any(capacity(pool, node) for node in labelled):
        return f"{asked}, and no {'such ' if pool.labels else ''}node is that large: {_too_large(name, pool, labelled)}"
    room = room_for(pool, nodes)
    where = {"STRICT_PACK": "on the one node that has most room", "STRICT_SPREAD": "on as many nodes, one on each"}
    return (f"{asked}, and there is room for {room} {where.get(pool.strategy, 'on all such nodes together')}: "
            f"lower pools.{name}.bundles to {room} or add nodes")


def _too_large(name: str, pool: PoolConfig, nodes: Sequence[Node]) -> str:
    """What the nodes lack for a single bundle, and what to change."""
    most = {kind: max(node.resources.get(kind, 0.0) for node in nodes) for kind in pool.bundle}
    short = {kind: amount for kind, amount in pool.bundle.items() if most[kind] < amount}
    if not short:
        return (f"none has all of it at once. Make its bundles smaller (pools.{name}) and raise pools.{name}.bundles, "
                "or add larger nodes")
    lacking = "; ".join(f"{amount:g} {kind} needed, {most[kind]:g} the most that one has"
                        for kind, amount in short.items())
    return f"{lacking}. {' and '.join(_less(name, kind, most[kind]) for kind in short)}, or add larger nodes"


def _less(name: str, kind: str, most: float) -> str:
    if kind not in ("CPU", "GPU"):
        return f"Correct pools.{name}.resources, start nodes with {kind} (`ray start --resources`)"
    raised = f" at most and raise pools.{name}.bundles" if most else ""
    return f"Set pools.{name}.{kind.lower()}s to {most:g}{raised}"


def _together(pools: Mapping[str, PoolConfig], found: Arrangement) -> str:
    asked = "; ".join(asked_for(name, pool) for name, pool in pools.items())
    rest = [f"{pools[name].bundles - missing} of the {_bundles(pools[name].bundles)} of pool {name!r}"
            for name, missing in found.missing.items()]
    fields = " or ".join(f"pools.{name}.bundles" for name in found.missing)
    return (f"each pool fits on these nodes alone, but not all together: {asked}. Beside the others there is room for "
            f"{' and '.join(rest)}: lower {fields}, make bundles smaller, or add nodes")


def _as_option(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value.lstrip('!')}" for key, value in labels.items())


def _bundles(count: int) -> str:
    return f"{count} bundle{'' if count == 1 else 's'}"


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
