"""Do all nodes see the same files? Workers load models and write checkpoints themselves, wherever they run."""

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlhf_ray.cluster.nodes import present_nodes
from rlhf_ray.errors import ClusterError

ANSWER_S = 120.0
"""Longest wait for a node's answer: it starts a process for it."""


async def require_files(wanted: Mapping[str, Sequence[str]]) -> None:
    """Refuse nodes that do not see what workers on them are going to read or write.

    Args:
        wanted: Ray's id of a node -> paths that must exist there. This process's own node is not asked.

    Raises:
        ClusterError: naming nodes and paths, and what to do.
    """
    here = ray.get_runtime_context().get_node_id()
    others = {node: list(paths) for node, paths in wanted.items() if node != here and paths}
    answers = await asyncio.gather(*(_asked(node, paths) for node, paths in others.items()))
    names = {node.id: node.name for node in present_nodes()} if any(answers) else {}
    missing = [f"  {names.get(node, node)}: {path}" for node, paths in zip(others, answers, strict=True)
               for path in paths]
    if missing:
        raise ClusterError(
            "nodes of the pools do not see files that this process sees:\n" + "\n".join(missing) + "\nPut them on a "
            "file system that all nodes mount at the same place, name them by absolute paths, or name models by their "
            "place on the Hub; run.dir has to be shared too, since learners write their checkpoints themselves")


async def _asked(node: str, paths: list[str]) -> list[str]:
    """Those of the paths that a node does not see; none where it cannot be asked, which others will notice."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    try:
        ref = ray.remote(num_cpus=0, max_retries=0)(_absent).options(scheduling_strategy=there).remote(paths)
        found: list[str] = await asyncio.wait_for(ref, ANSWER_S)
    except (ray.exceptions.RayError, TimeoutError):
        return []
    return found


def _absent(paths: list[str]) -> list[str]:
    return [path for path in paths if not os.path.exists(path)]


@contextmanager
def footprint(directory: Path) -> Iterator[str]:
    """A file that is in this directory and in no other of the same name: its path, while the enclosed work goes on."""
    file = directory.absolute() / f".seen-from-{uuid4().hex}"
    file.touch()
    try:
        yield str(file)
    finally:
        file.unlink(missing_ok=True)
