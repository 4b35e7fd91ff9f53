"""Advantage estimators: one small function each, chosen by name.

Defines which inputs an estimator reads: token rewards, a critic's values, or the other samples of the prompt. The
formulas are in `advantages`. No estimator whitens: that is a later step, over the whole batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from torch import Tensor, where

from rlhf_ray.algorithms.advantages import discounted_returns, gae, gdpo_advantages, group_advantages
from rlhf_ray.algorithms.masking import select, wide
from rlhf_ray.errors import ConfigError

Result = tuple[Tensor, Tensor]
"""(advantages, returns): `[B, T]`, 0 outside the mask."""


@dataclass(frozen=True)
class ScoredResponses:
    """The inputs of an estimator."""

    scores: Tensor
    """[B] reward of each response's last token, penalties and clip included."""
    penalties: Tensor
    """[B, T] added to every token's reward: minus coefficient times KL, or zeros where the KL is in the loss."""
    mask: Tensor
    """[B, T] bool, True on response tokens."""
    groups: Tensor
    """[B] integers: samples of one prompt have equal numbers."""
    values: Tensor | None
    """[B, T] critic's values; None without a critic."""
    gamma: float
    lam: float | Tensor
    """GAE's lambda, of all rows or `[B]` of each."""
    critic_lam: float | None = None
    """Lambda of the returns that the critic learns; None for that of the advantages."""
    step_rewards: Tensor | None = None
    """[B, T] rewards of single tokens, beside the score: those of a process reward model. None without any."""
    components: Tensor | None = None
    """[B, K] components of the scores, before their weights and before anything is done to the sum."""
    component_weights: Tensor | None = None
    """[K] weights of the components."""

    @property
    def outcomes(self) -> Tensor:
        """[B] total of a response: its score and its step rewards."""
        scores = wide(self.scores)
        return scores if self.step_rewards is None else scores + select(self.step_rewards, self.mask).sum(-1)

    def rewards(self) -> Tensor:
        """[B, T] token rewards: penalties and step rewards where they fall, the score on the last True token."""
        rewards = self.outcome_rewards(self.scores)
        return rewards if self.step_rewards is None else rewards + select(self.step_rewards, self.mask)

    def outcome_rewards(self, outcomes: Tensor) -> Tensor:
        """[B, T] token rewards with one number per response, on the last True token, in place of all but penalties."""
        return token_rewards(outcomes, -self.penalties, self.mask, 1.0)


def estimate(name: str, responses: ScoredResponses) -> Result:
    """Advantages by the estimator of this name.

    Raises:
        ConfigError: an unknown name, or a prompt with too few samples (`advantages.group_advantages`).
        ValueError: "gae" without values, "gdpo" without components.
    """
    if name not in ESTIMATORS:
        raise ConfigError(f"estimator {name!r} is unknown; use one of {', '.join(ESTIMATORS)}")
    return ESTIMATORS[name](responses)


def estimate_counted(name: str, responses: ScoredResponses, counted: Tensor) -> Result:
    """As `estimate` of some responses: the others enter no baseline, and their advantages and returns are 0.

    Args:
        counted: `[B]` bool.
    """
    if counted.all():
        return estimate(name, responses)
    of_rows = {"scores", "penalties", "mask", "groups", "values", "step_rewards", "components"}
    chosen = {field.name: value[counted] for field in fields(responses)
              if field.name in of_rows and (value := getattr(responses, field.name)) is not None}
    if isinstance(responses.lam, Tensor):
        chosen["lam"] = responses.lam[counted]
    found = estimate(name, replace(responses, **chosen)) if counted.any() else ()
    columns = [wide(responses.penalties).new_zeros(responses.mask.shape) for _ in range(2)]
    for column, its in zip(columns, found, strict=False):
        column[counted] = its.to(column.dtype)
    return columns[0], columns[1]


def generalised(responses: ScoredResponses) -> Result:
    """Generalised advantage estimation with a critic (Schulman et al. 2016, eq. 16).

    A lambda of its own for the critic decouples the two (VC-PPO, Yuan et al. 2025): 1 gives it unbiased returns.
    """
    if responses.values is None:
        raise ValueError("the gae estimator needs a critic's values")
    r, rewards = responses, responses.rewards()
    advantages, returns = gae(rewards, responses.values, r.mask, r.gamma, r.lam)
    if r.critic_lam is not None:
        returns = gae(rewards, responses.values, r.mask, r.gamma, r.critic_lam)[1]
    return advantages, returns


def reinforce(responses: ScoredResponses) -> Result:
    """The discounted return of each token (Williams 1992). Whitened over the batch it is REINFORCE++ (Hu 2025)."""
    returns = discounted_returns(responses.rewards(), responses.mask, responses.gamma)
    return returns, returns


def reinforce_baseline(responses: ScoredResponses) -> Result:
    """Discounted returns of the outcome less its group's mean; token penalties are not compared with the group's."""
    centred = responses.outcome_rewards(group_advantages(responses.outcomes, responses.groups, "mean"))
    returns = discounted_returns(responses.rewards(), responses.mask, responses.gamma)
    return discounted_returns(centred, responses.mask, responses.gamma), returns


def leave_one_out(responses: ScoredResponses) -> Result:
    """RLOO (Kool et al. 2019; Ahmadian et al. 2024): total reward less the mean of the prompt's other samples."""
    return _on_every_token(responses, group_advantages(_totals(responses), responses.groups, "rloo"))


def group_relative(responses: ScoredResponses) -> Result:
    """GRPO (Shao et al. 2024, section 4.1.2): total reward less the group's mean, over its standard deviation."""
    return _on_every_token(responses, group_advantages(_totals(responses), responses.groups, "grpo"))


def group_centred(responses: ScoredResponses) -> Result:
    """Dr. GRPO (Liu et al. 2025): total reward less the group's mean."""
    return _on_every_token(responses, group_advantages(_totals(responses), responses.groups, "dr_grpo"))


def reward_decoupled(responses: ScoredResponses) -> Result:
    """GDPO (Liu et al. 2026): each component of the score compared within its group, then weighted and summed.

    It reads the components as they were scored. Penalties, clips and normalisation apply to their sum, which nothing
    here reads (verl, NeMo-RL and TRL alike): the configuration refuses them.
    """
    if responses.components is None or responses.component_weights is None:
        raise ValueError("the gdpo estimator needs the components of the scores and their weights")
    return _on_every_token(
        responses, gdpo_advantages(responses.components, responses.groups, responses.component_weights))


def _totals(responses: ScoredResponses) -> Tensor:
    """[B] outcome plus all token penalties: a sequence is one action, and its reward one number."""
    return responses.outcomes + select(responses.penalties, responses.mask).sum(-1)


def _on_every_token(responses: ScoredResponses, advantages: Tensor) -> Result:
    """`[B]` advantages on each True token of their rows."""
    returns = discounted_returns(responses.rewards(), responses.mask, responses.gamma)
    return select(advantages[:, None].expand_as(responses.mask), responses.mask), returns


ESTIMATORS: dict[str, Callable[[ScoredResponses], Result]] = {
    "gae": generalised,
    "reinforce": reinforce,
    "reinforce_pp": reinforce,
    "reinforce_baseline": reinforce_baseline,
    "rloo": leave_one_out,
    "grpo": group_relative,
    "dr_grpo": group_centred,
    "gdpo": reward_decoupled,
}


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float, clip: float | None = None) -> Tensor:
    """-kl_coef * kl on every response token, plus the score on each row's last one (Ziegler et al. 2019, eq. 2).

    The last response token is the end-of-sequence token where the response ended by itself.

    Args:
        scores: `[B]`. A NaN stays a NaN: a failed reward is no zero.
        kl: `[B, T]` per-token estimates (`kl.approx_kl`).
        mask: `[B, T]` bool, True on response tokens.
        kl_coef: weight of the penalty.
        clip: bounds the scores to ±clip (not the KL); None for no bound.

    Returns:
        `[B, T]` float32 or wider, 0 outside the mask; a row without any True token is all 0.

    Raises:
        ConfigError: clip is not positive.
        ValueError: shapes do not agree.
    """
    if clip is not None and not clip > 0:
        raise ConfigError(f"reward clip {clip} would erase every score; give a positive bound or none")
    if scores.shape != mask.shape[:1]:
        raise ValueError(f"scores of shape {tuple(scores.shape)} for a mask of shape {tuple(mask.shape)}; one a row")
    scores = wide(scores) if clip is None else wide(scores).clamp(-clip, clip)
    penalties = select(wide(kl) * -kl_coef, mask)
    return where(last_true(mask), penalties + scores[:, None], penalties)


def last_true(mask: Tensor) -> Tensor:
    """`[B, T]` bool with each row's last True alone; nothing in rows without any."""
    true_from_here_on = mask.flip(-1).cumsum(-1).flip(-1)
    return mask & (true_from_here_on == 1)
