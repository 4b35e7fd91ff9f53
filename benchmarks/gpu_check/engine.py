"""One generator with vLLM and one learner, on one GPU: each check starts both anew."""

from collections.abc import AsyncIterator

from benchmarks.gpu_check import measures
from benchmarks.gpu_check.pair import pair
from benchmarks.gpu_check.pair_settings import ON_CPU, ON_GPU, PairSetting
from benchmarks.gpu_check.rows import Row, judged, not_run
from benchmarks.gpu_check.runner import Place
from rlhf_ray.config.learner import LoRAConfig
from rlhf_ray.planning.hardware import gpu_of

UPDATES = 3
"""Of adapters, before they are published."""


async def object_store(place: Place) -> AsyncIterator[Row]:
    """Whole weights through main memory, speeds, memory, and a step in turns at level 2 of sleep."""
    setting = PairSetting(ON_GPU if place.gpu else ON_CPU, sleep_level=2)
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
    """Weights read by handle under ZeRO-3, and a step in turns at level 1 of sleep."""
    if not place.gpu:
        yield not_run("publication by ipc", "CUDA's handles need a GPU")
        return
    async with pair(PairSetting(ON_GPU, "ipc", zero_stage=3, sleep_level=1), place.directory) as both:
        async for row in measures.publications(both, version=1):
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
