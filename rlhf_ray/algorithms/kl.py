"""How far the policy is from the reference: per-token estimators, and the controllers of the penalty's coefficient."""

import math
from typing import Literal

from torch import Tensor, expm1

from rlhf_ray.algorithms.masking import wide
from rlhf_ray.errors import ConfigError

Estimator = Literal["k1", "k2", "k3", "abs"]

MAX_PROPORTIONAL_ERROR = 0.2
"""The adaptive controller sees an error of at most ±20 % (Ziegler et al. 2019, section 2.2)."""


def approx_kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: Estimator = "k1") -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens that the policy sampled, in nats.

    With d = logprobs - ref_logprobs (Schulman 2020, "Approximating KL divergence"; never clamped):
    k1 = d, unbiased; k2 = d²/2, biased, low variance; k3 = exp(-d) - 1 + d, unbiased, never negative; abs = |d|.

    Args:
        logprobs, ref_logprobs: of one shape, any.

    Returns:
        the same shape, float32 or wider. No mask is applied: mask the result (entries outside may be NaN).

    Raises:
        ConfigError: an unknown estimator.
    """
    d = wide(logprobs) - wide(ref_logprobs)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        return expm1(-d) + d  # exp(-d) - 1 + d would lose small d to rounding, and with it the sign
    if estimator == "abs":
        return d.abs()
    raise ConfigError(f'KL estimator {estimator!r} is unknown; use "k1", "k2", "k3" or "abs"')


class FixedKL:
    """A coefficient that stays as it is. Same interface as `AdaptiveKL`."""

    def __init__(self, coef: float):
        if not coef >= 0:
            raise ConfigError(f"KL coefficient {coef} is not a number >= 0; give one, 0 turns the penalty off")
        self.value = float(coef)

    def update(self, observed: float, n: int) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps: the coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Does nothing: a resumed run has the coefficient of its own configuration."""


class AdaptiveKL(FixedKL):
    """Moves the coefficient towards a target KL (Ziegler et al. 2019, section 2.2, with K_β = n / horizon).

    value <- value * (1 + clip(observed / target - 1, -0.2, 0.2) * n / horizon)

    Args:
        coef: coefficient to start from; 0 would stay 0.
        target: KL to aim at, in the unit of `observed` (nats per sequence in `config.algorithm`), > 0.
        horizon: samples over which an error is corrected, > 0.

    Raises:
        ConfigError: an argument out of these bounds.
    """

    def __init__(self, coef: float, target: float, horizon: float):
        super().__init__(coef)
        if not (target > 0 and horizon > 0):
            raise ConfigError(f"adaptive KL with target={target}, horizon={horizon}: both must be positive")
        self.target = float(target)
        self.horizon = float(horizon)

    def update(self, observed: float, n: int) -> None:
        """Takes the mean KL of `n` samples. A NaN observation changes nothing.

        Raises:
            ConfigError: n is 5 horizons or more: a single update could turn the coefficient to 0 or below.
        """
        if n * MAX_PROPORTIONAL_ERROR >= self.horizon:
            raise ConfigError(
                f"adaptive KL with horizon={self.horizon:g} and {n} samples an update could turn the coefficient "
                f"negative; set the horizon above {n * MAX_PROPORTIONAL_ERROR:g} (usual: 10000)"
            )
        if math.isnan(observed):
            return
        error = observed / self.target - 1
        error = min(max(error, -MAX_PROPORTIONAL_ERROR), MAX_PROPORTIONAL_ERROR)
        self.value *= 1 + error * n / self.horizon

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continues from a `state_dict`."""
        self.value = float(state["value"])
