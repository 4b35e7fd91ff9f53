"""Bounded staleness: how many samples may be started, and which are too old to train on. Pure arithmetic.

A *version* counts the updates made so far: version v is the policy after v updates, each of exactly `batch` samples.
The *staleness* of an experience trained at version c is c - m, where m is the oldest version among its tokens.

Why the bound holds. At version v, `AdmissionRule` starts a sample only while

    accepted + running < (η + v + 1) · batch     and     generating < concurrency

where `accepted` counts every sample ever committed and not dropped (v · batch of them are trained) and `running` those
under way, of which the generators have `generating`. (The second condition is not needed for the bound. It keeps
samples from aging in a generator's queue.) Weights only get newer while a sample is generated, so no token of a sample
admitted at version a is older than a, and it may be trained up to version a + η.

Say that the untrained samples, in order of admission, are *in time* at version v when sample number q among them (from
0) may still be trained at version v + floor(q / batch): when batches of the oldest would do. A new sample is: it comes
at q = accepted + running - v · batch, and by the rule v + floor(q / batch) ≤ v + η. Every batch preserves this. A batch
of the oldest moves every other sample up by a batch as the version grows by one; a batch that passes over a sample
under way is formed only if the others stay in time (`in_time`). So no sample is trained too old, and none becomes too
old to be trained: a batch waits for the samples that it may not pass over. With η = 0 it may pass over none.

`is_fresh`, checked at commit, lease and eviction, enforces the same bound independently: for samples whose generator
had older weights than it should, or that were generated with weights that a restored learner no longer has. They are
dropped and generated again, as are samples that are not in time when a run resumes with a smaller η
(`ReplayBuffer.trim`).

The rule is that of AReaL (Fu et al. 2025, "AReaL: A Large-Scale Asynchronous Reinforcement Learning System", eq. 3).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


def staleness(min_version: int, current_version: int) -> int:
    """Versions from the oldest token of an experience to the policy now; negative when it is ahead of the policy."""
    return current_version - min_version


def is_fresh(min_version: int, current_version: int, max_staleness: int) -> bool:
    """Whether an experience may be trained at `current_version`.

    Experience ahead of the policy is not fresh either: a restored learner no longer has the weights that generated it.
    """
    return 0 <= staleness(min_version, current_version) <= max_staleness


def in_time(chunks: Iterable[tuple[int, int]], batch: int, version: int, max_staleness: int) -> bool:
    """Whether batches in the order given train every sample within the bound.

    Args:
        chunks: (samples, oldest version) of each to train, in order of admission.
        batch: samples of one update.
        version: of the policy when the first of the batches is trained.
    """
    before = 0
    for samples, oldest in chunks:
        before += samples
        if staleness(oldest, version + (before - 1) // batch) > max_staleness:
            return False
    return True


@dataclass(frozen=True)
class AdmissionRule:
    """How many new samples may be started now."""

    batch: int
    """Samples of one update."""
    max_staleness: int
    """η: the largest staleness that may be trained."""
    concurrency: int
    """Largest number of samples that generators work on at the same time."""

    def allowance(self, version: int, accepted: int, running: int, generating: int) -> int:
        """min(concurrency - generating, (η + version + 1)·batch - accepted - running): samples that may be started.

        Args:
            version: of the weights that the generators hold.
            accepted: samples committed so far and not dropped, the trained ones included.
            running: samples started and not yet committed.
            generating: those of them that generators work on.

        Returns:
            A number of samples, never negative.
        """
        lead = (self.max_staleness + version + 1) * self.batch - accepted - running
        return max(0, min(self.concurrency - generating, lead))
