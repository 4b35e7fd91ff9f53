"""Would experience flow? Combinations of numbers with which a run would wait for ever, refused before anything starts.

Each check raises ValueError with the fields, their values and what to change.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_ray.config.bundles import Bundles, assigned
from rlhf_ray.config.loop import BufferConfig, CoordinatorConfig
from rlhf_ray.config.run import ClusterConfig, PlacementConfig, PoolConfig

BYTES_PER_TOKEN, BYTES_PER_VALUE = 25, 4
"""Of a token in `records.Experience`: id, mask and five numbers; one number more with a critic."""
MIB = 2**20


def check_chunks(loop: CoordinatorConfig, samples: int, chunk: int, concurrency: int) -> None:
    """Chunks must hold whole prompts, make up whole batches where batches form past stragglers, and be admitted.

    Args:
        samples: of one update.
        chunk: `generator.chunk`.
        concurrency: most samples with the generators, given or derived.
    """
    if chunk % loop.samples_per_prompt:
        raise ValueError(f"generator.chunk={chunk} is not a multiple of coordinator.samples_per_prompt="
                         f"{loop.samples_per_prompt}; a prompt's samples travel together")
    if loop.max_staleness and samples % chunk:
        raise ValueError(
            f"with coordinator.max_staleness={loop.max_staleness} batches form past stragglers, so the {samples} "
            f"samples of a step must be a multiple of generator.chunk={chunk}; change one")
    if concurrency < chunk:
        raise ValueError(f"coordinator.concurrency={concurrency} lets no chunk of generator.chunk={chunk} "
                         "samples start; raise it to at least that (several chunks keep a generator busy)")


def check_buffer(
    buffer: BufferConfig, samples: int, max_staleness: int, longest: int, capacity_mb: int | None, critic: bool
) -> None:
    """The buffer must hold what freshness admits, and the bytes of the longest batch there can be.

    Args:
        samples: of one update.
        longest: most tokens of a sample.
        capacity_mb: most MiB of experience, given or derived; None without a bound.
        critic: whether experience holds a critic's values.
    """
    needed = (max_staleness + 1) * samples
    if buffer.capacity_samples is not None and buffer.capacity_samples < needed:
        raise ValueError(
            f"buffer.capacity_samples={buffer.capacity_samples} cannot hold (max_staleness + 1) x {samples} = {needed} "
            "samples and the loop would wait for ever; raise it or leave it empty")
    per_token = BYTES_PER_TOKEN + (BYTES_PER_VALUE if critic else 0)
    batch_mb = -(-samples * longest * per_token // MIB)
    if capacity_mb is not None and capacity_mb < batch_mb:
        name = "buffer.capacity_mb" if buffer.capacity_mb else "half of cluster.object_store_mb"
        raise ValueError(
            f"{name}={capacity_mb} may not hold one batch: {samples} samples of up to {longest} tokens "
            f"(prompts.max_tokens + generator.sampling.max_tokens) are {batch_mb} MiB of experience, and a buffer full "
            "of less than a batch waits for ever; raise it, or lower coordinator.prompts_per_step or a max_tokens")


def check_deadlines(buffer: BufferConfig, cluster: ClusterConfig) -> None:
    """A lease must outlive the update that it is for."""
    lease_s, call_s = buffer.lease_timeout_s, cluster.call_timeout_s
    if lease_s < call_s:
        raise ValueError(
            f"buffer.lease_timeout_s={lease_s:g} is less than cluster.call_timeout_s={call_s:g}: experience would come "
            "back to be trained again while an update may still be training on it; raise it to at least that")


@dataclass(frozen=True)
class Seat:
    """Where one worker of a role lives."""

    role: str
    rank: int
    pool: str
    bundle: int
    """Number of the bundle in its pool."""


def check_bundles(pools: dict[str, PoolConfig], placements: dict[str, PlacementConfig]) -> None:
    """Every worker must find a bundle with room for it; errors as in `seats`."""
    seats(pools, placements)


def seats(pools: dict[str, PoolConfig], placements: dict[str, PlacementConfig]) -> list[Seat]:
    """The bundle of every worker, as `config.bundles` chooses it: sums over a pool do not tell.

    Raises:
        ValueError: a worker finds none.
    """
    found = []
    for name, pool in pools.items():
        users = {role: place for role, place in placements.items() if place.pool == name}
        bundles = assigned(pool, users)
        if not isinstance(bundles, Bundles):
            role, place = next((role, place) for role, place in users.items() if place is bundles)
            raise ValueError(
                f"pools.{name}: its {pool.bundles} bundles of {pool.cpus:g} cpus and {pool.gpus:g} gpus have room "
                f"for all workers together, but not one by one: a worker lives in one bundle, and {role} with "
                f"{place.cpus:g} cpus and {place.gpus:g} gpus finds none; make bundles larger or give {role} less")
        found += [Seat(role, rank, name, number) for (role, rank), number in bundles.assignments.items()]
    return found
