"""One generator with vLLM and one learner, on one GPU: each check starts its own."""

import time
from collections.abc import AsyncIterator

from benchmarks.gpu_check import measures
from benchmarks.gpu_check.pair import pair
from benchmarks.gpu_check.pair_settings import ON_CPU, ON_GPU, PairSetting
from benchmarks.gpu_check.rows import Row, judged
from benchmarks.gpu_check.runner import Place
from rlhf_ray.config.learner import LoRAConfig
from rlhf_ray.planning.hardware import gpu_of

UPDATES = 3
"""Of adapters, before they are published."""


async def object_store(place: Place) -> AsyncIterator[Row]:
    """Whole weights of ZeRO-3 through main memory, speeds, memory, and a step in turns at level 1 of sleep."""
    setting = PairSetting(ON_GPU if place.gpu else ON_CPU, zero_stage=3, sleep_level=1)
    device = gpu_of(place.gpus[0]) if place.gpu else None
    async with pair(setting, place.directory) as both:
        async for row in measures.publications(both, version=1):
            yield row
        async for row in measures.speeds(both, device):
            yield row
        for row in measures.memory(both, device):
            yield row
        async for row in measures.turns(both, version=50):
            yield row


async def ipc_handles(place: Place) -> AsyncIterator[Row]:
    """Weights read by handle in two sizes of buckets, and a step in turns at level 2 of sleep. In a rehearsal they go
    through main memory."""
    began = time.perf_counter()
    setting = PairSetting(ON_GPU, "ipc", sleep_level=2) if place.gpu else PairSetting(ON_CPU)
    async with pair(setting, place.directory) as both:
        yield Row("start of a generator and a learner", f"{time.perf_counter() - began:.1f} s", "models are made first")
        async for row in measures.in_buckets(both, 1, (256, 1024) if place.gpu else (1, 64)):
            yield row
        async for row in measures.turns(both, version=50):
            yield row


async def adapters(place: Place) -> AsyncIterator[Row]:
    """Adapters alone, after some updates of them."""
    scale = ON_GPU if place.gpu else ON_CPU
    async with pair(PairSetting(scale, lora=LoRAConfig()), place.directory) as both:
        rollout, _ = await measures.draw(both, 1)
        untrained = await measures.gap(both, 2)
        experience = await measures.as_experience(both, rollout)
        for step in range(1, UPDATES + 1):
            await measures.update(both, experience, step)
        before = await measures.gap(both, 3)
        published = await both.sync.publish(1)
        after = await measures.gap(both, 4)
        yield judged("parity before adapters are trained", f"{untrained:.2g}", untrained <= scale.tolerance,
                     f"mean difference of log-probabilities; at most {scale.tolerance:g}")
        yield judged("parity after adapters were published", f"{after:.2g}", after <= scale.tolerance < before,
                     f"{before:.2g} before; at most {scale.tolerance:g}")
        yield Row("publication of adapters", f"{published.seconds:.2f} s", f"{published.nbytes / 1e6:,.1f} MB")
