"""Would it fit at all? The plan of a run on given nodes, of which only what is certain not to work is an error."""

from collections.abc import Sequence
from dataclasses import replace

from rlhf_ray.config.stages import StageConfig
from rlhf_ray.errors import ConfigError, ModelError
from rlhf_ray.planning.local_machine import this_machine
from rlhf_ray.planning.model_lookup import shape_of
from rlhf_ray.planning.nodes import Node
from rlhf_ray.planning.plan import make_plan

MARGIN = 1.15
"""Estimates are this far off (docs/plan.md), and what lies within is tried."""


def check_fit(config: StageConfig) -> None:
    """Refuse a run of which this machine could not hold the memory; nothing on a cluster that is joined, whose nodes
    are not known yet, nor where the shape of a model is not.

    Raises:
        ConfigError: what would not fit, and the fields to change.
    """
    if config.cluster.address is not None:
        return
    import psutil

    node = this_machine(list(config.pools.values()), psutil.virtual_memory().total)
    if any(pool.gpus for pool in config.pools.values()) and node.gpu is None:
        return  # that there is no GPU is told where pools are placed
    try:
        require_fit(config, [node])
    except ModelError:  # a model on the Hub, or of a form that planning does not know: it may well fit
        return


def require_fit(config: StageConfig, nodes: Sequence[Node]) -> None:
    """Refuse a run that cannot work on these nodes.

    Raises:
        ConfigError: what would not fit, and the fields to change.
        ModelError: the shape of a model is not known.
    """
    refused = make_plan(config, [_with_margin(node) for node in nodes], shape_of).refused
    if refused:
        raise ConfigError("the run does not fit the machines it is for:\n" + "\n".join(f"  {text}" for text in refused)
                          + f"\n  (their memory is counted {MARGIN - 1:.0%} larger than it is, because estimates err; "
                          "`rlhf-ray plan` shows all of it)")


def _with_margin(node: Node) -> Node:
    gpu = replace(node.gpu, memory_bytes=MARGIN * node.gpu.memory_bytes) if node.gpu else None
    return replace(node, memory_bytes=MARGIN * node.memory_bytes, gpu=gpu)
