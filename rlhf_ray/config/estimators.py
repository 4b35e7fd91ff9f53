"""The advantage estimators that `algorithm.estimator` chooses from, each with the fields that act in it."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlhf_ray.config.fields import type_tag
from rlhf_ray.config.type_union import TypedSection, one_of


class EstimatorSection(TypedSection):
    """What an estimator is, beside its fields."""

    method: ClassVar[str]
    """What its paper calls the training with it."""
    compares_groups: ClassVar[bool] = False
    """Whether it compares a sample with the other samples of its prompt."""
    always_whitens: ClassVar[bool] = False
    """Whether its definition includes whitening over the batch."""


class DiscountingEstimator(EstimatorSection):
    """An estimator of token rewards, which lie apart in time."""

    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token; 1 for language (Ziegler et al. 2019, InstructGPT)."""


class GAEEstimator(DiscountingEstimator):
    """Generalised advantage estimation (Schulman et al. 2016), the only estimator with a critic."""

    method = "PPO"

    type: Literal["gae"] = "gae"
    """The sum of a critic's errors along the response."""
    lam: float = Field(0.95, ge=0, le=1)
    """GAE's λ (Schulman et al. 2016; 0.95 in InstructGPT, TRL)."""
    lam_alpha: float | None = Field(None, gt=0)
    """Length-adaptive λ of each response in place of `lam`: 1 - 1 / (α length) (VAPO, Yue et al. 2025: 0.05); off when
    empty."""
    lam_critic: float | None = Field(None, ge=0, le=1)
    """λ of the returns that the critic learns (VAPO: 1); that of the advantages if empty."""
    whiten: bool = True
    """Whiten advantages over the whole batch's response tokens (Ziegler et al. 2019, TRL)."""


class ReinforceEstimator(DiscountingEstimator):
    """REINFORCE (Williams 1992)."""

    method = "REINFORCE"

    type: Literal["reinforce"] = "reinforce"
    """The discounted return; needs one sample per prompt."""
    whiten: bool = False
    """Whiten advantages over the whole batch's response tokens; with it, this is reinforce_pp."""


class ReinforcePPEstimator(DiscountingEstimator):
    """REINFORCE++ (Hu 2025): its advantages are always whitened over the whole batch."""

    method = "REINFORCE++"
    always_whitens = True

    type: Literal["reinforce_pp"] = "reinforce_pp"
    """The discounted return, whitened."""


class ReinforceBaselineEstimator(DiscountingEstimator):
    """REINFORCE++-baseline (Hu 2025)."""

    method = "REINFORCE++-baseline"
    compares_groups = True

    type: Literal["reinforce_baseline"] = "reinforce_baseline"
    """The discounted return of the score minus the mean of the prompt's scores."""
    whiten: bool = False
    """Whiten advantages over the whole batch's response tokens (REINFORCE++-baseline does)."""


class RLOOEstimator(EstimatorSection):
    """REINFORCE leave-one-out (Kool et al. 2019, Ahmadian et al. 2024)."""

    method = "RLOO"
    compares_groups = True

    type: Literal["rloo"] = "rloo"
    """A score minus the mean of the prompt's other scores."""
    whiten: bool = False
    """Whiten advantages over the whole batch's response tokens (Ahmadian et al. 2024 do not)."""


class GRPOEstimator(EstimatorSection):
    """Group relative advantages (Shao et al. 2024)."""

    method = "GRPO"
    compares_groups = True

    type: Literal["grpo"] = "grpo"
    """A score minus the mean of the prompt's scores, over their standard deviation."""
    whiten: bool = False
    """Whiten advantages over the whole batch's response tokens (Shao et al. 2024 do not)."""


class DrGRPOEstimator(EstimatorSection):
    """Group relative advantages without the division (Liu et al. 2025)."""

    method = "Dr. GRPO"
    compares_groups = True

    type: Literal["dr_grpo"] = "dr_grpo"
    """A score minus the mean of the prompt's scores."""
    whiten: bool = False
    """Whiten advantages over the whole batch's response tokens (Liu et al. 2025 do not)."""


class GDPOEstimator(EstimatorSection):
    """Group reward-decoupled normalisation (Liu et al. 2026), for several rewards. The sum is always whitened over the
    whole batch."""

    method = "GDPO"
    compares_groups = True
    always_whitens = True

    type: Literal["gdpo"] = "gdpo"
    """Each reward minus its mean over the prompt's samples, over their standard deviation; summed by weight."""


ESTIMATORS: tuple[type[EstimatorSection], ...] = (
    GAEEstimator, ReinforceEstimator, ReinforcePPEstimator, ReinforceBaselineEstimator, RLOOEstimator,
    GRPOEstimator, DrGRPOEstimator, GDPOEstimator)
"""All of the union."""
EstimatorConfig = Annotated[
    GAEEstimator | ReinforceEstimator | ReinforcePPEstimator | ReinforceBaselineEstimator | RLOOEstimator
    | GRPOEstimator | DrGRPOEstimator | GDPOEstimator,
    Field(discriminator="type"), one_of(ESTIMATORS, "gae"),
]
METHODS = {str(type_tag(section)): section.method for section in ESTIMATORS}
"""Estimator -> what its papers call the training with it."""
GROUP_ESTIMATORS = tuple(str(type_tag(section)) for section in ESTIMATORS if section.compares_groups)
"""Estimators that compare a sample with the other samples of its prompt."""
