"""A publication of weights to two generators on one node, compared with what it must do at least.

It uses a real policy learner, `WeightSync`, Ray's object store and two real generators with vLLM. The weights go from
the learner into the store (one copy) and from there to each of two generators (two copies, at the same time), where
vLLM packs them for its kernels: `benchmarks.bare_publication` times only these copies and vLLM's own packing,
alternating with publications. A publication is over when both generators have confirmed its version. No tokens are
generated meanwhile, as in synchronous PPO. Then each size is published again while both generators generate, which
gives the share of a publication in which they are paused.

The generators start with other weights than the learner's. Afterwards both must give the learner's log-probabilities.
"""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.bare_publication import BarePublication, Seconds
from benchmarks.comparison import DifferentWork
from benchmarks.figure import Figure
from benchmarks.publish_workers import Sizes, make_models, publishing_roles
from benchmarks.workload import SEED, prompts
from rlhf_ray.config.generation import SamplingConfig, WeightsConfig
from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.coordinator.weight_sync import WeightSync
from rlhf_ray.records import Rollout, SampleKey
from rlhf_ray.roles.generator import Generator
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.workers.role_groups import RoleGroups

SIZES = {
    "100mb": Sizes(hidden=512, intermediate=1408, layers=8),
    "400mb": Sizes(hidden=1024, intermediate=2816, layers=8),
}
WARM_UP = 3
"""Publications, beside those that fill the object store, before the first that counts. The store hands out its memory
from one end to the other before it uses any again, and the kernel clears each page when it is first touched."""
SAMPLES, LONGEST = 8, 24
"""Responses that each generator makes during a publication, and their length in tokens."""
TOLERANCE = 1e-3
"""Largest difference of two log-probabilities of the same weights: other kernels, other orders of sums."""
GOAL, PAUSE_GOAL = 1.5, 1 / 3
"""Publication / copies and packing; pause / publication."""


@dataclass
class Measured:
    """Seconds of one size's turns."""

    nbytes: int = 0
    published: list[float] = field(default_factory=list)
    bare: list[Seconds] = field(default_factory=list)
    bare_fresh: list[Seconds] = field(default_factory=list)
    """With copies out into new pages."""
    busy: list[float] = field(default_factory=list)
    """Publications while tokens are made."""
    pauses: list[float] = field(default_factory=list)
    """Of `busy`, the longer of the two generators'."""
    profile: dict[str, float] = field(default_factory=dict)

    @property
    def pause_shares(self) -> list[float]:
        """Pause / publication."""
        return [pause / seconds for pause, seconds in zip(self.pauses, self.busy, strict=True)]


def measure(directory: Path, repeats: int) -> dict[str, Figure]:
    """The figures `publish_vs_bare_100mb`, `publish_vs_bare_400mb` and `publish_pause_share`.

    Raises:
        DifferentWork: a generator does not compute with the weights that were published.
    """
    measured = {name: asyncio.run(_measure(directory, name, repeats)) for name in SIZES}
    figures = {f"publish_vs_bare_{name}": _ratio(its) for name, its in measured.items()}
    return figures | {"publish_pause_share": _pause_share(measured)}


async def _measure(directory: Path, name: str, repeats: int) -> Measured:
    models = make_models(directory, name, SIZES[name])
    table = prompts(directory, SAMPLES)
    its = Measured()
    async with publishing_roles(*models) as roles:
        sync = WeightSync(WeightsConfig(), roles)
        await _require(roles, table, same=False)
        its.nbytes = (await sync.publish(version := 1)).nbytes
        for _ in range(WARM_UP + (ClusterConfig().object_store_mb << 20) // its.nbytes):
            await sync.publish(version := version + 1)
        await _require(roles, table, same=True)
        with BarePublication(its.nbytes, SIZES[name].matrices) as bare:
            bare.seconds()
            for _ in range(repeats):
                its.bare.append(bare.seconds())
                its.published.append((await sync.publish(version := version + 1)).seconds)
                its.bare_fresh.append(bare.seconds(fresh=True))
        for _ in range(repeats):
            await _publish_in_flight(its, roles, sync, table, version := version + 1)
        its.profile = await profile(roles, version + 1, repeats)
        await _require(roles, table, same=True)
    return its


async def _draw(roles: RoleGroups, table: Any, epoch: int) -> list[Rollout]:
    sampling = SamplingConfig(max_tokens=LONGEST)
    keys = [SampleKey(epoch, row, 0) for row in range(SAMPLES)]
    return await roles.generators.values(Generator.generate, table, keys, SEED, sampling)


async def _publish_in_flight(its: Measured, roles: RoleGroups, sync: WeightSync, table: Any, version: int) -> None:
    """Publish while both generators are making tokens, which the versions in their responses prove."""
    before = await roles.generators.values(Generator.tokens_made)
    drawing = asyncio.create_task(_draw(roles, table, version))
    now = before
    while any(one == other for one, other in zip(now, before, strict=True)):
        await asyncio.sleep(0.005)
        now = await roles.generators.values(Generator.tokens_made)
    published = await sync.publish(version)
    for rollout in await drawing:
        if not {version - 1, version} <= set(rollout.versions.tolist()):
            raise DifferentWork("publish: responses ended before the publication did; raise LONGEST")
    its.busy.append(published.seconds)
    its.pauses.append(published.pause_seconds)


async def _require(roles: RoleGroups, table: Any, same: bool) -> None:
    """Compare log-probabilities of generators and learner; before the first publication they must differ.

    Raises:
        DifferentWork: they do not differ, or do.
    """
    for rank, rollout in enumerate(await _draw(roles, table, 0)):
        ours = (await roles.policy.values(PolicyLearner.logprobs, rollout))[0].values
        gap = float(np.abs(ours - rollout.logprobs)[rollout.response_mask].max())
        if (gap < TOLERANCE) != same:
            raise DifferentWork(f"publish: log-probabilities of generator {rank} and learner differ by {gap:.2g}")


def _ratio(its: Measured) -> Figure:
    ratios = [mine / sum(bare) for mine, bare in zip(its.published, its.bare, strict=True)]
    return Figure(
        value=median(ratios), repeats=ratios, better="lower", goal=GOAL,
        ours_is=f"publication of {its.nbytes / 1e6:.0f} MB",
        theirs_is="copy into shared memory, two copies out of it, vLLM's packing of both",
        unit="s", ours=median(its.published), theirs=median(sum(bare) for bare in its.bare),
        more={"seconds_of_copies": median(bare.copies for bare in its.bare),
              "seconds_of_packing": median(bare.packing for bare in its.bare),
              "seconds_of_copies_with_fresh_pages": median(bare.copies for bare in its.bare_fresh),
              "seconds_while_generating": median(its.busy), "pause_seconds": median(its.pauses),
              "gb_per_second": its.nbytes / median(its.published) / 1e9,
              "seconds_one_after_the_other": its.profile},
    )


def _pause_share(measured: dict[str, Measured]) -> Figure:
    """Of the size with the larger share."""
    name, its = max(measured.items(), key=lambda item: median(item[1].pause_shares))
    return Figure(
        value=median(its.pause_shares), repeats=its.pause_shares, better="lower", goal=PAUSE_GOAL,
        ours_is=f"generation paused, {name}", theirs_is="publication while generating", unit="s",
        ours=median(its.pauses), theirs=median(its.busy),
        more={other: median(shares.pause_shares) for other, shares in measured.items()},
    )


async def profile(roles: RoleGroups, version: int, repeats: int) -> dict[str, float]:
    """Seconds of each part of a publication with nothing overlapped, medians of `repeats`. Versions count up
    from `version`.

    `gather and seal` and `verify, load and pack` are the workers' own time; the two `store` parts are the rest of the
    driver's time: serialising into the store, finding objects, calls and replies.
    """
    plans = await roles.policy.values(PolicyLearner.plan_weights, WeightsConfig().bucket_bytes, [])
    buckets = plans[0].whole.buckets
    turns = [await _publish_in_parts(roles, buckets, version + turn) for turn in range(repeats)]
    return {part: median(turn[part] for turn in turns) for part in turns[0]}


async def _publish_in_parts(roles: RoleGroups, buckets: int, version: int) -> dict[str, float]:
    parts = dict.fromkeys(("begin", "gather and seal", "into the store", "verify, load and pack", "out of the store",
                           "finish"), 0.0)
    clock = _Clock()
    await roles.generators.values(Generator.begin_weights, version, version, buckets)
    parts["begin"] = clock.lap()
    for index in range(buckets):
        bucket = roles.policy.call(0, PolicyLearner.weight_bucket, version, index)
        own = await bucket.done()
        parts["gather and seal"] += own
        parts["into the store"] += clock.lap() - own
        calls = roles.generators.call_all(Generator.load_weights, bucket.ref, version)
        own = max([await call.done() for call in calls])
        parts["verify, load and pack"] += own
        parts["out of the store"] += clock.lap() - own
    await roles.generators.values(Generator.finish_weights, version)
    parts["finish"] = clock.lap()
    return parts


class _Clock:
    def __init__(self) -> None:
        self._at = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last call."""
        before, self._at = self._at, time.perf_counter()
        return self._at - before
