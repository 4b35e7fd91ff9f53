"""PPO's numbers. Defaults follow the sources named at each field."""

from typing import Literal

from pydantic import Field, model_validator

from rlhf_ray.config.base import Section


class KLConfig(Section):
    """Penalty for leaving the reference model, inside the token rewards (Ziegler et al. 2019, eq. 2)."""

    coef: float = Field(0.05, ge=0)
    """Coefficient β; TRL's PPO default."""
    kind: Literal["fixed", "adaptive"] = "fixed"
    """"adaptive" moves β towards `target` (Ziegler et al. 2019, section 2.2)."""
    target: float = Field(6.0, gt=0)
    """Sequence KL in nats that the adaptive controller aims at (Ziegler et al. 2019; TRL used 6)."""
    horizon: int = Field(10_000, ge=1)
    """Samples over which the adaptive controller corrects the error (Ziegler et al. 2019: 10000)."""
    estimator: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Per-token estimator (Schulman 2020, "Approximating KL divergence"); k1 is the unbiased log-ratio."""


class AlgorithmConfig(Section):
    """Proximal policy optimisation (Schulman et al. 2017) for token sequences."""

    estimator: Literal["gae"] = "gae"
    """Advantage estimator: generalised advantage estimation with a critic (Schulman et al. 2016)."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token; 1 for language (Ziegler et al. 2019, InstructGPT)."""
    lam: float = Field(0.95, ge=0, le=1)
    """GAE's λ (Schulman et al. 2016; 0.95 in InstructGPT, TRL)."""
    epochs: int = Field(2, ge=1)
    """Passes over each batch of experience (TRL 4, OpenRLHF 1; InstructGPT 1)."""
    mini_batches: int = Field(4, ge=1)
    """Optimizer steps per pass; must divide the samples of a step."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """Lower clip of the probability ratio, 1 - clip_low (Schulman et al. 2017: 0.2)."""
    clip_high: float = Field(0.2, gt=0)
    """Upper clip of the probability ratio, 1 + clip_high (0.2; DAPO raises it to 0.28)."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound of the loss at negative advantages (Ye et al. 2020; verl uses 3); off when empty."""
    value_clip: float | None = Field(0.2, gt=0)
    """Clip of the value change around the old value (PPO2); off when empty."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus; 0 as in most RLHF work."""
    aggregate: Literal["token", "sequence"] = "token"
    """Mean over all response tokens, or mean of the rows' means."""
    whiten_advantages: bool = True
    """Whiten advantages over the whole batch's response tokens."""
    reward_clip: float | None = Field(None, gt=0)
    """Clip scores to ± this before they become token rewards (many use 5 or 10); off when empty."""
    missing_eos_penalty: float | None = Field(None, ge=0)
    """Subtracted from the score of a response that did not end by itself (TRL: 1.0 in its examples); off when empty."""
    critic_warmup_steps: int = Field(0, ge=0)
    """First steps in which only the critic learns (verl's critic_warmup)."""
    kl: KLConfig = Field(default_factory=KLConfig)
    """Penalty towards the reference."""

    @model_validator(mode="after")
    def _adaptive_needs_coef(self) -> "AlgorithmConfig":
        if self.kl.kind == "adaptive" and self.kl.coef == 0:
            raise ValueError("kl.kind=adaptive multiplies the coefficient and cannot leave kl.coef=0; make it positive")
        return self
