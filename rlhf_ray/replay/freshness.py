"""How many samples may be started, and which are too old to train on. Pure arithmetic; the buffer applies it.

A *version* counts the updates made so far: version v is the policy after v updates, each of exactly `batch` samples.
The *staleness* of an experience trained at version c is c - m, where m is the oldest version among its tokens.

Why the bound holds. At version v, `AdmissionRule` starts a sample only while

    accepted + running < (η + v + 1) · batch

where `accepted` counts every sample ever committed and not dropped (v · batch of them are trained) and `running` those
under way. Number the samples from 0 in admission order. Sample n was admitted at a version v with
n < (η + v + 1) · batch, that is v ≥ floor(n / batch) - η. Batches take samples in admission order, so sample n belongs
to batch floor(n / batch) and is trained at version c = floor(n / batch). Weights only get newer while a sample is
generated, so m ≥ v, and its staleness is c - m ≤ c - v ≤ η. Dropping a sample leaves `accepted`, so a later sample,
admitted at a version no smaller, takes the freed place and the argument stands.

With η ≥ 1 a batch may form without waiting for a straggler. The straggler is then trained later than its number says,
so admission alone no longer bounds it: `is_fresh`, asked at commit, lease and eviction, does. Both together guarantee
that nothing older than η versions is trained, and that little is generated in vain.

The rule is that of AReaL (Fu et al. 2025, "AReaL: A Large-Scale Asynchronous Reinforcement Learning System", eq. 3).
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_ray.errors import BufferError


def staleness(min_version: int, current_version: int) -> int:
    """Versions from the oldest token of an experience to the policy now; negative when it is ahead of the policy."""
    return current_version - min_version


def is_fresh(min_version: int, current_version: int, max_staleness: int) -> bool:
    """Whether an experience may be trained at `current_version`.

    Experience ahead of the policy is not fresh either: it was made by weights that a rebuilt learner no longer has.
    """
    return 0 <= staleness(min_version, current_version) <= max_staleness


@dataclass(frozen=True)
class AdmissionRule:
    """How many new samples may be started now."""

    batch: int
    """Samples of one update."""
    max_staleness: int
    """η: the largest staleness that may be trained."""

    def __post_init__(self) -> None:
        if self.batch < 1 or self.max_staleness < 0:
            raise BufferError(
                f"admission needs batch >= 1 and max_staleness >= 0; got batch={self.batch}, "
                f"max_staleness={self.max_staleness}"
            )

    def allowance(self, version: int, accepted: int, running: int) -> int:
        """(η + version + 1)·batch - accepted - running: samples that may be started.

        Args:
            version: updates made so far.
            accepted: samples committed so far and not dropped, the trained ones included.
            running: samples started and not yet committed.

        Returns:
            A number of samples, never negative.
        """
        return max(0, (self.max_staleness + version + 1) * self.batch - accepted - running)
