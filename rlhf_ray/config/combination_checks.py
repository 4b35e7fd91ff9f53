"""Checks of combinations of sections, made before anything starts.

They refuse numbers with which a run would wait for ever, a weight transport that the placement does not allow, and
GPU sharing with overlapping phases. Each check raises ValueError with the fields, their values and what to change.
"""

from collections.abc import Mapping

from rlhf_ray.config.generation import GenerationConfig
from rlhf_ray.config.learner import PPOLearnerConfig
from rlhf_ray.config.run import ClusterConfig, PlacementConfig, PoolConfig
from rlhf_ray.config.training_loop import BufferConfig, CoordinatorConfig

BYTES_PER_TOKEN, BYTES_PER_VALUE = 25, 4
"""Bytes of a token in `records.Experience`: id, mask and five numbers; with a critic one number more."""
MIB = 2**20


def check_chunks(loop: CoordinatorConfig, samples: int, chunk: int, concurrency: int) -> None:
    """Chunks must hold whole prompts, divide a batch if batches form in order of completion, and fit the concurrency.

    Args:
        samples: samples of one update.
        chunk: `generator.chunk`.
        concurrency: maximum number of samples in flight, given or derived.
    """
    if chunk % loop.samples_per_prompt:
        raise ValueError(f"generator.chunk={chunk} is not a multiple of coordinator.samples_per_prompt="
                         f"{loop.samples_per_prompt}; the samples of a prompt are generated in one chunk")
    if loop.max_staleness and samples % chunk:
        raise ValueError(
            f"with coordinator.max_staleness={loop.max_staleness} batches form in order of completion, so the "
            f"{samples} samples of a step must be a multiple of generator.chunk={chunk}; change one")
    if concurrency < chunk:
        raise ValueError(f"coordinator.concurrency={concurrency} is less than generator.chunk={chunk}, so no chunk "
                         "could start; raise it to at least that (several chunks keep a generator busy)")


def check_buffer(
    buffer: BufferConfig, samples: int, max_staleness: int, longest: int, capacity_mb: int | None, critic: bool
) -> None:
    """The buffer must hold all samples that max_staleness admits, and the bytes of the largest possible batch.

    Args:
        samples: samples of one update.
        longest: maximum tokens of a sample.
        capacity_mb: maximum MiB of experience, given or derived; None without a bound.
        critic: whether experience contains a critic's values.
    """
    needed = (max_staleness + 1) * samples
    if buffer.capacity_samples is not None and buffer.capacity_samples < needed:
        raise ValueError(
            f"buffer.capacity_samples={buffer.capacity_samples} cannot hold (max_staleness + 1) x {samples} = {needed} "
            "samples, so the loop would wait for ever; raise it or leave it empty")
    per_token = BYTES_PER_TOKEN + (BYTES_PER_VALUE if critic else 0)
    batch_mb = -(-samples * longest * per_token // MIB)
    if capacity_mb is not None and capacity_mb < batch_mb:
        name = "buffer.capacity_mb" if buffer.capacity_mb else "half of cluster.object_store_mb"
        raise ValueError(
            f"{name}={capacity_mb} may not hold one batch: {samples} samples of up to {longest} tokens "
            f"(prompts.max_tokens + generator.sampling.max_tokens) are {batch_mb} MiB of experience, and a "
            "buffer smaller than a batch waits for ever; raise it, or lower coordinator.prompts_per_step or "
            "max_tokens")


def check_deadlines(buffer: BufferConfig, cluster: ClusterConfig) -> None:
    """A lease must last longer than the update that uses it."""
    lease_s, call_s = buffer.lease_timeout_s, cluster.call_timeout_s
    if lease_s < call_s:
        raise ValueError(
            f"buffer.lease_timeout_s={lease_s:g} is less than cluster.call_timeout_s={call_s:g}: experience would be "
            "leased again while an update may still be training on it; raise it to at least that")


def settled_transport(
    transport: str, generator: GenerationConfig, policy: PlacementConfig, pools: Mapping[str, PoolConfig]
) -> str:
    """Resolve "auto": "ipc" if every generator certainly shares a GPU with a policy rank, "nccl" if all generators and
    ranks have whole GPUs, else "object_store". Other values are returned unchanged."""
    if transport != "auto":
        return transport
    if generator.engine == "in_process":
        return "object_store"
    if _meet_on_every_gpu(generator, policy, pools):
        return "ipc"
    return "nccl" if generator.gpus >= 1 and policy.gpus >= 1 else "object_store"


def check_transport(
    transport: str, generator: GenerationConfig, policy: PlacementConfig, pools: Mapping[str, PoolConfig]
) -> None:
    """Refuse a GPU transport without GPUs, or with a placement that it does not support."""
    if transport in ("auto", "object_store"):
        return
    asked = f"weights.transport={transport}"
    if not generator.gpus or not policy.gpus:
        raise ValueError(
            f"{asked} copies weights from GPU to GPU, but generator.gpus={generator.gpus:g} and policy.gpus="
            f"{policy.gpus:g}; give both GPUs, or set weights.transport to object_store, which works on any hardware")
    if generator.engine == "in_process":
        raise ValueError(f"{asked} needs generator.engine=async (or auto), whose processes receive weights from a GPU")
    if transport == "nccl" and (generator.gpus < 1 or policy.gpus < 1):
        raise ValueError(
            f"{asked} needs one GPU per process, because NCCL refuses two processes on one GPU, but generator.gpus="
            f"{generator.gpus:g} and policy.gpus={policy.gpus:g} share GPUs; set weights.transport to ipc, or "
            "give each process whole GPUs")
    if transport == "ipc" and not _meet_on_every_gpu(generator, policy, pools):
        raise ValueError(
            f"{asked} shares memory within one GPU, so every generator must be on the GPU of a policy rank: place "
            "both in a pool of one bundle with one GPU, with fractions of at most 1 together (now generator.pool="
            f"{generator.pool}, {generator.workers} x {generator.gpus:g} gpus; policy.pool={policy.pool}, "
            f"{policy.workers} x {policy.gpus:g}); or set weights.transport to auto")


def check_phases(generator: GenerationConfig, learners: Mapping[str, PPOLearnerConfig], max_staleness: int) -> None:
    """Refuse sleeping and offloading between phases if rollouts and updates overlap, as no role is ever idle then."""
    asked = [f"{name}.offload_between_phases=true" for name, own in learners.items() if own.offload_between_phases]
    if generator.sleep_level:
        asked.append(f"generator.sleep_level={generator.sleep_level}")
    if asked and max_staleness:
        raise ValueError(f"{asked[-1]} needs rollouts and updates to alternate, but with coordinator.max_staleness="
                         f"{max_staleness} they overlap; set max_staleness to 0, or turn both settings off")


def _meet_on_every_gpu(
    generator: GenerationConfig, policy: PlacementConfig, pools: Mapping[str, PoolConfig]
) -> bool:
    """Whether each generator is certain to share the GPU of a policy rank. In a pool of several bundles, two generators
    may be in one bundle and two ranks in another."""
    pool = pools.get(generator.pool)
    fractions = generator.gpus > 0 and policy.gpus > 0 and generator.gpus + policy.gpus <= 1
    return pool is not None and generator.pool == policy.pool and (pool.bundles, pool.gpus) == (1, 1) and fractions
