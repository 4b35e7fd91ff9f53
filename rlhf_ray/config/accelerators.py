"""What GPUs allow: which way weights can travel, and whether roles that share a GPU take turns on it.

Each check raises ValueError with the fields, their values and what to change.
"""

from collections.abc import Mapping

from rlhf_ray.config.generation import GenerationConfig
from rlhf_ray.config.learner import PPOLearnerConfig
from rlhf_ray.config.run import PlacementConfig, PoolConfig


def settled_transport(
    transport: str, generator: GenerationConfig, policy: PlacementConfig, pools: Mapping[str, PoolConfig]
) -> str:
    """The transport itself, or what "auto" stands for: "ipc" where every generator certainly shares a GPU with a rank
    of the policy, "nccl" where all of both have GPUs of their own, "object_store" otherwise."""
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
    """Refuse a transport between GPUs where there are none, or where they are not as it needs them."""
    if transport in ("auto", "object_store"):
        return
    asked = f"weights.transport={transport}"
    if not generator.gpus or not policy.gpus:
        raise ValueError(
            f"{asked} moves weights from GPU to GPU, but generator.gpus={generator.gpus:g} and policy.gpus="
            f"{policy.gpus:g}; give both GPUs, or set weights.transport to object_store, which works on any hardware")
    if generator.engine == "in_process":
        raise ValueError(f"{asked} needs generator.engine: async (or auto), whose processes take weights from a GPU")
    if transport == "nccl" and (generator.gpus < 1 or policy.gpus < 1):
        raise ValueError(
            f"{asked} joins processes with a GPU each, and NCCL refuses two on one, but generator.gpus="
            f"{generator.gpus:g} and policy.gpus={policy.gpus:g} share theirs; set weights.transport to ipc, or give "
            "each whole GPUs")
    if transport == "ipc" and not _meet_on_every_gpu(generator, policy, pools):
        raise ValueError(
            f"{asked} hands memory over within one GPU, so every generator has to be on the GPU of a policy rank: put "
            "both into a pool of one bundle with one GPU, with fractions of at most 1 together (now generator.pool="
            f"{generator.pool}, {generator.workers} x {generator.gpus:g} gpus; policy.pool={policy.pool}, "
            f"{policy.workers} x {policy.gpus:g}); or set weights.transport to auto")


def check_phases(generator: GenerationConfig, learners: Mapping[str, PPOLearnerConfig], max_staleness: int) -> None:
    """Refuse turns on a GPU where rollouts and updates overlap: nobody would ever be idle."""
    asked = [f"{name}.offload_between_phases=true" for name, own in learners.items() if own.offload_between_phases]
    if generator.sleep_level:
        asked.append(f"generator.sleep_level={generator.sleep_level}")
    if asked and max_staleness:
        raise ValueError(f"{asked[-1]} needs rollouts and updates to take turns, and with coordinator.max_staleness="
                         f"{max_staleness} they overlap; set max_staleness to 0, or leave both settings off")


def _meet_on_every_gpu(
    generator: GenerationConfig, policy: PlacementConfig, pools: Mapping[str, PoolConfig]
) -> bool:
    """Whether each generator is certain to lie on the GPU of a policy rank. In a pool of several bundles Ray may put
    two generators into one, and two ranks into another."""
    pool = pools.get(generator.pool)
    fractions = generator.gpus > 0 and policy.gpus > 0 and generator.gpus + policy.gpus <= 1
    return pool is not None and generator.pool == policy.pool and (pool.bundles, pool.gpus) == (1, 1) and fractions
