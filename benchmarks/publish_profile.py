"""Where a publication's time goes: its parts one after the other, with nothing overlapped."""

import time
from statistics import median

from rlhf_ray.config.generation import WeightsConfig
from rlhf_ray.coordinator.role_groups import RoleGroups


async def profile(roles: RoleGroups, version: int, repeats: int) -> dict[str, float]:
    """Seconds by part, medians of some publications; versions count up from `version`.

    `gather and seal` and `verify, load and pack` are the workers' own time; the two `store` parts are what lies between
    it and the driver's clock: serialising into the store, finding objects, calls and answers.
    """
    plans = await roles.policy.values("plan_weights", WeightsConfig().bucket_mb << 20, [])
    buckets = plans[0].whole.buckets
    turns = [await _one(roles, buckets, version + turn) for turn in range(repeats)]
    return {part: median(turn[part] for turn in turns) for part in turns[0]}


async def _one(roles: RoleGroups, buckets: int, version: int) -> dict[str, float]:
    parts = dict.fromkeys(("begin", "gather and seal", "into the store", "verify, load and pack", "out of the store",
                           "finish"), 0.0)
    clock = _Clock()
    await roles.generators.values("begin_weights", version, version, buckets)
    parts["begin"] = clock.lap()
    for index in range(buckets):
        bucket = roles.policy.call(0, "weight_bucket", version, index)
        own = (await bucket.done()).seconds
        parts["gather and seal"] += own
        parts["into the store"] += clock.lap() - own
        calls = roles.generators.call_all("load_weights", bucket.ref, version)
        own = max([(await call.done()).seconds for call in calls])
        parts["verify, load and pack"] += own
        parts["out of the store"] += clock.lap() - own
    await roles.generators.values("finish_weights", version)
    parts["finish"] = clock.lap()
    return parts


class _Clock:
    def __init__(self) -> None:
        self._at = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last call."""
        before, self._at = self._at, time.perf_counter()
        return self._at - before
