"""Changes of a response's score before it becomes a reward: normalisation over the run, length penalties.

Pure functions and one small running statistic. Scores are `[B]`, one per response.
"""

import math

from torch import Tensor

from rlhf_ray.algorithms.masking import wide
from rlhf_ray.errors import ConfigError

MIN_DEVIATION = 1e-6
"""Scores that hardly differ are not scaled up: a standard deviation below this counts as 1."""


class RunningMoments:
    """Mean and standard deviation of all scores seen so far (merged by Chan et al. 1979), in float64."""

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, 0.0, 0.0

    def update(self, scores: Tensor) -> None:
        """Takes more scores `[B]`; those that are not finite are left out."""
        new = scores[scores.isfinite()].double()
        if not len(new):
            return
        mean, gap, total = float(new.mean()), float(new.mean()) - self.mean, self.count + len(new)
        self._squares += float((new - mean).square().sum()) + gap**2 * self.count * len(new) / total
        self.mean += gap * len(new) / total
        self.count = total

    @property
    def deviation(self) -> float:
        """Unbiased standard deviation (n-1); 1 before two scores were seen, or while they hardly differ."""
        spread = math.sqrt(self._squares / (self.count - 1)) if self.count > 1 else 0.0
        return spread if spread > MIN_DEVIATION else 1.0

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"count": self.count, "mean": self.mean, "squares": self._squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Goes on from a `state_dict`."""
        self.count, self.mean, self._squares = int(state["count"]), state["mean"], state["squares"]


def overlong_penalty(lengths: Tensor, limit: int, buffer: int) -> Tensor:
    """Soft overlong punishment (DAPO, Yu et al. 2025, eq. 13): 0 up to limit - buffer, then falling to -1 at limit.

    Args:
        lengths: `[B]` response tokens.
        limit: length of the full penalty.
        buffer: tokens over which it grows, at most `limit`.

    Returns:
        `[B]` float32 in [-1, 0].

    Raises:
        ConfigError: a buffer that is not between 1 and the limit.
    """
    if not 1 <= buffer <= limit:
        raise ConfigError(f"an overlong buffer of {buffer} tokens does not lie within a limit of {limit}")
    return -((wide(lengths) - (limit - buffer)) / buffer).clamp(0, 1)


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """[B] lambda of each response: 1 - 1 / (alpha * length), at least 0 (VAPO, Yue et al. 2025).

    The weights of a lambda-return sum up to about 1 / (1 - lambda) steps: this makes them alpha of the response.

    Args:
        lengths: `[B]` response tokens; a row of none gets 0.
        alpha: > 0; 0.05 in the paper.

    Raises:
        ConfigError: alpha is not positive.
    """
    if not alpha > 0:
        raise ConfigError(f"length-adaptive lambda with alpha={alpha}; use a positive one (0.05)")
    return (1 - 1 / (alpha * wide(lengths))).clamp(min=0)
