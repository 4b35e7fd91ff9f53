"""Processes that come, go, or have a GPU each."""

import time
from collections.abc import AsyncIterator

from benchmarks.gpu_check import measures
from benchmarks.gpu_check.pair import TIMEOUT_S, pair
from benchmarks.gpu_check.pair_settings import ON_CPU, ON_GPU, PairSetting
from benchmarks.gpu_check.rows import Row, judged, not_run
from benchmarks.gpu_check.runner import Place


async def restart(place: Place) -> AsyncIterator[Row]:
    """The generator is killed and started again beside the learner, which keeps its memory, and catches up."""
    scale = ON_GPU if place.gpu else ON_CPU
    async with pair(PairSetting(scale), place.directory) as both:
        generators = both.roles.generators
        await both.sync.publish(1)
        await generators.respawn(0, "the check killed it")
        began = time.perf_counter()
        await generators.start(timeout_s=TIMEOUT_S)
        seconds = time.perf_counter() - began
        before = await measures.gap(both, 1)
        await both.sync.publish(2, resend=True)
        after = await measures.gap(both, 2)
        yield judged("parity after a restart beside a live learner", f"{after:.2g}", after <= scale.tolerance < before,
                     f"{before:.2g} before it caught up; at most {scale.tolerance:g}")
        yield Row("start of the new generator", f"{seconds:.1f} s")


async def nccl(place: Place) -> AsyncIterator[Row]:
    """Broadcasts from one GPU to another; between CPUs over gloo, under ZeRO-3."""
    if place.gpu and len(place.gpus) < 2:
        yield not_run("publication by nccl", "NCCL joins processes with a GPU each, and here is one")
        return
    setting = PairSetting(ON_GPU, "nccl", apart=True) if place.gpu else PairSetting(ON_CPU, "nccl", zero_stage=3)
    async with pair(setting, place.directory) as both:
        async for row in measures.publications(both, version=1):
            yield row
        async for row in measures.turns(both, version=50):
            yield row
