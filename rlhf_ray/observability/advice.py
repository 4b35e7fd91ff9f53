"""One recommendation from what the roles did: which knob would shorten the step, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_ray.observability.waiting import BUSY, COORDINATOR, bottleneck, mean_shares

Shares = Mapping[str, Mapping[str, float]]

NOTICEABLE = 0.15
"""Share of time below which a change would hardly be felt."""
DISTURBED = ("faults/lost_workers", "faults/seconds_down")
"""Metrics of a step that say that not all workers were there."""
LEARNERS = ("policy_learner", "critic_learner")
MORE = {
    "generator": "more generators (generator.workers), each on a core or GPU of its own",
    "reference_scorer": "more reference scorers (reference.workers)",
    "reward_scorer": "more reward scorers (reward.workers), or a lighter reward",
    "assembler": "more assemblers (assembler.workers)",
    "policy_learner": "more policy ranks (policy.workers), or fewer passes over each batch (algorithm.epochs)",
    "critic_learner": "more critic ranks (critic.workers), or fewer passes over each batch (algorithm.epochs)",
}
"""What makes a role faster."""


class Diagnosis(NamedTuple):
    """Why a run is no faster, in two sentences."""

    limit: str
    """Which role is the bottleneck."""
    advice: str
    """What to change first."""


def diagnosis(steps: Sequence[Mapping[str, Any]], max_staleness: int) -> Diagnosis:
    """From the metrics of some steps (`share/...`, `time/...`), but for those in which workers were missing, unless
    they were in all of them: waiting for a lost worker is nothing that other settings change."""
    steps = [row for row in steps if not any(row.get(name) for name in DISTURBED)] or steps
    shares = mean_shares(steps)
    role = bottleneck(shares)
    seconds = sum(row.get("time/step") or 0.0 for row in steps)
    publishing = sum(row.get("weights/publish_seconds") or 0.0 for row in steps) / seconds if seconds else 0.0
    busy = shares[role].get(BUSY, 0.0) if role else 0.0
    limit = f"bottleneck: {role}, busy for {busy:.0%} of the time" if role else "bottleneck: not known yet"
    return Diagnosis(limit, f"what to change: {recommend(shares, max_staleness, publishing)}")


def recommend(shares: Shares, max_staleness: int, publish_share: float = 0.0) -> str:
    """A sentence that says what to change first, or that nothing stands out.

    Args:
        shares: of each role's time, as `waiting.waiting_shares` gives them.
        max_staleness: the run's η.
        publish_share: of the wall time, spent publishing weights.
    """
    limit = bottleneck(shares)
    if limit is None:
        return "nothing was measured yet"
    if publish_share > NOTICEABLE:
        return (f"publishing weights takes {publish_share:.0%} of the time: more learning per version "
                "(coordinator.prompts_per_step), or adapters (policy.lora), whose untouched layers are not sent")
    nobody = min(share.get(COORDINATOR, 0.0) for share in shares.values())
    if nobody > NOTICEABLE:
        return (f"for {nobody:.0%} of the time no role works: larger chunks (generator.chunk) or larger steps "
                "(coordinator.prompts_per_step) lessen the cost of handing over")
    learning = max((shares[r].get(BUSY, 0.0) for r in LEARNERS if r in shares), default=0.0)
    generating = shares.get("generator", {}).get(BUSY, 0.0)
    if not max_staleness and min(learning, generating) > NOTICEABLE:
        gain = (learning + generating) / max(learning, generating)
        return (f"generators and learners take turns ({generating:.0%} and {learning:.0%} of the time): "
                f"coordinator.max_staleness=1 lets them work side by side, up to {gain:.1f} times as fast on hardware "
                "of their own")
    busiest = shares[limit].get(BUSY, 0.0)
    if max_staleness and min(learning, generating) < busiest - NOTICEABLE and busiest < 1 - NOTICEABLE:
        return (f"neither side is always busy (generators {generating:.0%}, learners {learning:.0%} of the time): "
                f"coordinator.max_staleness={max_staleness + 1} lets rollouts of uneven length even out, if training "
                "bears older samples")
    waiting = max((share.get(limit, 0.0) for role, share in shares.items() if role != limit), default=0.0)
    if waiting < NOTICEABLE:
        return "nothing stands out: the roles are in balance"
    return (f"{limit} limits the run (busy {busiest:.0%}, others wait for it up to {waiting:.0%}): "
            f"{MORE.get(limit, '')}{_to_spare(limit, learning, generating)}")


def _to_spare(limit: str, learning: float, generating: float) -> str:
    """Where the means for it could come from: the other side, when it is idle for more than half of its time."""
    side, busy, field = (("generators", generating, "generator.workers") if limit in LEARNERS else
                         ("learners", learning, "policy.workers, critic.workers"))
    if limit not in (*LEARNERS, "generator") or busy > 0.5:
        return ""
    return f"; {side} are idle for {1 - busy:.0%} of the time, so fewer of them ({field}) would do"
