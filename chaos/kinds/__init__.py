"""All kinds of fault, a module for each family (`chaos.kind` says how to add one)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from chaos.faults import Fault
from chaos.kind import Kind
from chaos.kinds import (
    agents,
    calls,
    checkpoints,
    cluster,
    disturbances,
    drivers,
    episodes,
    failures,
    functions,
    memory,
    messages,
    nodes,
    output,
    repairs,
    weights,
    workers,
    writers,
)
from chaos.requirements import NETWORK_NAMESPACES

KINDS: Mapping[str, Kind] = {kind.name: kind for family in (
    workers, repairs, memory, nodes, cluster, failures, functions, weights, episodes, agents, drivers, writers, output,
    messages, calls, disturbances, checkpoints) for kind in family.KINDS}
"""By name, in the order of the table."""


def kind_of(fault: Fault) -> Kind:
    """The kind of a fault."""
    return KINDS[fault.kind]


def triples(names: Iterable[str]) -> set[tuple[str, str, str]]:
    """The distinct (victim, mechanism, state) of some kinds."""
    return {KINDS[name].triple for name in names}


def not_possible(names: Iterable[str]) -> dict[str, str]:
    """The kinds that cannot be tried on this machine, and why."""
    return {name: reason for name in names if (reason := KINDS[name].not_possible())}


def needs_private_network(only: Iterable[str]) -> bool:
    """Whether one of these kinds, or of those in a round if there are none, requires network namespaces."""
    chosen = [KINDS[name] for name in only] or [kind for kind in KINDS.values() if any(kind.runs.values())]
    return any(NETWORK_NAMESPACES in kind.requires for kind in chosen)
