"""The losses that `algorithm.loss` chooses from, and the importance weights of `algorithm.importance`."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlhf_ray.config.section import Section
from rlhf_ray.config.type_union import TypedSection, one_of


class ClipLoss(TypedSection):
    """The clipped surrogate (Schulman et al. 2017, eq. 7)."""

    type: Literal["clip"] = "clip"
    """Advantage times probability ratio, without a gradient where the ratio is beyond its clip."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """Lower clip of the probability ratio, 1 - clip_low (Schulman et al. 2017: 0.2)."""
    clip_high: float = Field(0.2, gt=0)
    """Upper clip of the probability ratio, 1 + clip_high (0.2; DAPO raises it to 0.28)."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound of the loss at negative advantages (Ye et al. 2020; verl uses 3); off when empty."""
    ratio: Literal["token", "sequence"] = "token"
    """Probability ratio per token (PPO), or per response: the geometric mean of its tokens' (GSPO, Zheng et al.
    2025, which clips at 3e-4 and 4e-4 and aggregates by sequence)."""


class CISPOLoss(TypedSection):
    """Clipped importance sampling (MiniMax-M1, 2025; ScaleRL, Khatri et al. 2025)."""

    type: Literal["cispo"] = "cispo"
    """Advantage times log-probability, weighted by the bounded ratio, which is a constant: every token keeps its
    gradient. The ratio is to the generators' log-probabilities (`old_logprobs: generator`, the default with this type),
    so it corrects for their age too and takes the place of `importance`. `old_logprobs: policy` is allowed with
    max_staleness 0."""
    min_ratio: float = Field(0.0, ge=0)
    """Smallest ratio; 0 is no bound (MiniMax-M1, ScaleRL). SkyRL's default is 1: its fields are distances from 1."""
    max_ratio: float = Field(5.0, gt=0)
    """Largest ratio (TRL's recommendation; ScaleRL is as good with 4 to 8. SkyRL's default is 6)."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_ratio >= self.max_ratio:
            raise ValueError(f"min_ratio={self.min_ratio:g} is not less than max_ratio={self.max_ratio:g}; lower it "
                             "(0 is no bound)")
        return self


LOSSES = (ClipLoss, CISPOLoss)
"""All of the union."""
LossConfig = Annotated[ClipLoss | CISPOLoss, Field(discriminator="type"), one_of(LOSSES, "clip")]

Mask = Literal["geometric", "outlier"]


class ImportanceConfig(Section):
    """Weights of tokens by the learner's over the generator's probability, to correct for stale samples and numerical
    differences between engines."""

    tokens: Literal["none", "truncate", "mask", "band"] = "truncate"
    """Weights above the cap are truncated (Yao et al. 2025; TRL's token_truncate), or are 0 (mask); or weights outside
    the band are 0 (IcePop, Ring-1T 2025). By default none with old_logprobs=generator, which sets the two probabilities
    equal, and with loss=cispo, whose ratio has this weight in it."""
    cap: float = Field(2.0, gt=0)
    """Largest weight, for `truncate` and `mask` (2 in verl and SkyRL, 3 in TRL)."""
    band: tuple[float, float] = (0.5, 5.0)
    """Smallest and largest weight, for `band` (IcePop, and as suggested by verl and OpenRLHF)."""
    level: Literal["token", "sequence"] = "token"
    """One weight per token, or one per response: the product of its tokens' weights (exact, but of high variance)."""
    masks: list[Mask] = Field(default_factory=list)
    """Criteria by which whole responses are left out of the loss, beside the weights of tokens. Their tokens count in
    its denominator."""
    geometric: tuple[float, float] = (0.99, 1.01)
    """Bounds of the geometric mean of a response's weights, for the mask `geometric` (SkyRL; verl suggests 0.999 and
    1.001)."""
    outlier: tuple[float, float] = (1e-4, 100.0)
    """Bounds of each of a response's weights, for the mask `outlier`: one weight beyond them is sufficient (suggested
    by SkyRL)."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        for name in ("band", "geometric", "outlier"):
            low, high = getattr(self, name)
            if not 0 < low < high:
                raise ValueError(f"{name}=[{low:g}, {high:g}] must be two positive bounds of weights, the smaller one "
                                 f"first, such as {list(type(self).model_fields[name].default)}")
        if len(set(self.masks)) < len(self.masks):
            raise ValueError(f"masks={self.masks} names one twice; keep one")
        return self

    @property
    def acts(self) -> bool:
        """Whether any token is weighted or left out."""
        return self.tokens != "none" or bool(self.masks)
