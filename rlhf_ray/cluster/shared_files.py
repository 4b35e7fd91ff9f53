"""Checks that all nodes see the same files: workers read models and write checkpoints themselves, wherever they run."""

import asyncio
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlhf_ray.cluster.nodes import present_nodes
from rlhf_ray.cluster.resource_pools import Pools
from rlhf_ray.config.run import PlacementConfig
from rlhf_ray.errors import ClusterError

ANSWER_S = 120.0
"""Longest wait for a node's answer: Ray starts a process there for it."""


async def require_files(wanted: Mapping[str, Sequence[str]]) -> None:
    """Refuse nodes that do not see files that workers on them will read or write.

    Args:
        wanted: Ray's id of a node -> paths that must exist there. This process's own node is not checked.

    Raises:
        ClusterError: naming nodes and paths, and what to do.
    """
    here = ray.get_runtime_context().get_node_id()
    others = {node: list(paths) for node, paths in wanted.items() if node != here and paths}
    absent = await asyncio.gather(*(_absent_on(node, paths) for node, paths in others.items()))
    names = {node.id: node.name for node in present_nodes()} if any(absent) else {}
    missing = [f"  {names.get(node, node)}: {path}" for node, paths in zip(others, absent, strict=True)
               for path in paths]
    if missing:
        raise ClusterError(
            "nodes of the pools do not see files that this process sees:\n" + "\n".join(missing) + "\nPut them on a "
            "file system that all nodes mount at the same place, name them by absolute paths, or name models by their "
            "Hub id; run.dir must be shared too, since learners write their checkpoints themselves")


async def _absent_on(node: str, paths: list[str]) -> list[str]:
    """The paths that a node does not see; none when it does not answer, which other checks report."""
    on_node = NodeAffinitySchedulingStrategy(node, soft=False)
    try:
        ref = ray.remote(num_cpus=0, max_retries=0)(_absent).options(scheduling_strategy=on_node).remote(paths)
        absent: list[str] = await asyncio.wait_for(ref, ANSWER_S)
    except (ray.exceptions.RayError, TimeoutError):
        return []
    return absent


def _absent(paths: list[str]) -> list[str]:
    return [path for path in paths if not os.path.exists(path)]


@contextmanager
def marker_file(directory: Path) -> Iterator[str]:
    """Keep a file with a unique name in this directory during the enclosed work; yields its path."""
    file = directory.absolute() / f".seen-from-{uuid4().hex}"
    file.touch()
    try:
        yield str(file)
    finally:
        file.unlink(missing_ok=True)


async def require_shared_files(
    directory: Path, placements: Mapping[str, PlacementConfig], models: Mapping[str, Sequence[str]],
    writers: Collection[str], pools: Pools,
) -> None:
    """Refuse nodes that lack a model, or whose run.dir is a different directory from this process's.

    Args:
        directory: run.dir.
        placements: of the roles, by section.
        models: paths or Hub ids of the models that a role loads, by section.
        writers: sections of the roles that write into the run's directory.

    Raises:
        ClusterError: see `require_files`.
    """
    nodes = {name: pools.nodes_of(name) for name in {place.pool for place in placements.values()}}
    if not directory.is_dir():
        return
    with marker_file(directory) as marker:
        wanted: dict[str, set[str]] = defaultdict(set)
        for role, place in placements.items():
            paths = {path for path in models[role] if Path(path).exists()}  # the others are Hub ids
            for node in nodes[place.pool]:
                wanted[node] |= paths | ({marker} if role in writers else set())
        await require_files({node: sorted(paths) for node, paths in wanted.items()})
