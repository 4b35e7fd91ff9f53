"""Pools as placement groups: created together, with a deadline, refused when the cluster cannot hold them."""

import asyncio
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from rlhf_ray.config.run import PoolConfig
from rlhf_ray.errors import ClusterError


class Pools:
    """The run's placement groups by name. `open` before workers are spawned, `close` after they are gone."""

    def __init__(self, configs: dict[str, PoolConfig]) -> None:
        self._configs = configs
        self._groups: dict[str, PlacementGroup] = {}

    async def open(self, timeout_s: float) -> None:
        """Reserve all pools.

        Raises:
            ClusterError: a pool was not placed in time; says what it asks for and what the cluster has.
        """
        for name, config in self._configs.items():
            self._groups[name] = placement_group(
                [_bundle(config)] * config.bundles, strategy=config.strategy, name=name,
                **({"bundle_label_selector": [config.labels] * config.bundles} if config.labels else {}),
            )
        for name, group in self._groups.items():
            try:
                await asyncio.wait_for(_ready(group), timeout_s)
            except TimeoutError:
                self.close()
                raise ClusterError(_refusal(name, self._configs[name], timeout_s)) from None

    def group(self, name: str) -> PlacementGroup:
        """The placement group of a pool."""
        return self._groups[name]

    def close(self) -> None:
        """Give all resources back; workers still inside are killed by Ray."""
        for group in self._groups.values():
            remove_placement_group(group)
        self._groups.clear()


async def _ready(group: PlacementGroup) -> None:
    await group.ready()


def _bundle(config: PoolConfig) -> dict[str, float]:
    bundle = {"CPU": config.cpus, "GPU": float(config.gpus)}
    return {kind: amount for kind, amount in bundle.items() if amount}


def _refusal(name: str, config: PoolConfig, timeout_s: float) -> str:
    total, free = ray.cluster_resources(), ray.available_resources()

    def show(resources: dict[str, Any]) -> str:
        return ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU"))

    labels = f" on nodes labelled {config.labels}" if config.labels else ""
    return (f"pool {name!r} was not placed within {timeout_s:g} s: it asks for {config.bundles} bundles of "
            f"{show(_bundle(config))}{labels} ({config.strategy}); the cluster has {show(total)}, free {show(free)}. "
            f"Lower pools.{name} or add nodes.")
