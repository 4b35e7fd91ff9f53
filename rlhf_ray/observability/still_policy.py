"""A policy that training hardly moves."""

from collections.abc import Mapping, Sequence
from typing import Any

FIRST_STEP = 20
"""Step from which a policy should have moved."""
LAST_ROWS = 5
"""Number of steps of which the mean KL is taken."""
STILL_KL = 0.05
"""Nats a response. The quickstart's policy is over 3 after five steps; with a rate of 1e-6 it has 0.02 after forty."""


def still_policy(rows: Sequence[Mapping[str, Any]]) -> str:
    """A sentence about a policy that is still close to its reference, and what to change.

    Args:
        rows: of metrics.jsonl, in order; those of steps count.

    Returns:
        empty if the policy has moved, has made too few steps, or its KL is not measured.
    """
    steps = [row for row in rows if row.get("kl/sequence") is not None and row.get("policy/learning_rate")][-LAST_ROWS:]
    if not steps or steps[-1]["step"] < FIRST_STEP:
        return ""
    kl = sum(abs(row["kl/sequence"]) for row in steps) / len(steps)
    if kl >= STILL_KL:
        return ""
    moved = f"the policy has hardly moved: KL {kl:.2g} nats a response after step {steps[-1]['step']}"
    if not any(row.get("reward/std", 1.0) for row in steps):
        return f"{moved}. All samples of a step have the same reward, so there is nothing to learn from"
    return (f"{moved}. If the reward does not rise, raise policy.optimizer.learning_rate "
            f"({steps[-1]['policy/learning_rate']:g}); small models need larger ones")
