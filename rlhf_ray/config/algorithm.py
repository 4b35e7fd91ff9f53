"""Hyperparameters of PPO. Each field names the source of its default."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from rlhf_ray.config.data import DataSection, MixedSource
from rlhf_ray.config.estimators import (
    ESTIMATORS,
    GROUP_ESTIMATORS,
    METHODS,
    DiscountingEstimator,
    EstimatorConfig,
    GAEEstimator,
    GRPOEstimator,
    ReinforceEstimator,
    RLOOEstimator,
)
from rlhf_ray.config.fields import sections_of, type_tag
from rlhf_ray.config.losses import CISPOLoss, ClipLoss, ImportanceConfig, LossConfig
from rlhf_ray.config.presets import PRESETS, fill
from rlhf_ray.config.section import Section, as_set
from rlhf_ray.config.type_union import one_of, tag_of

OldLogprobs = Literal["policy", "update", "generator"]
"""Source of the denominator of the ratio: a forward pass before the update, the update's own, or the generators."""
COMMAND_OF = {"gae": "ppo", "reinforce": "reinforce", "rloo": "rloo", "grpo": "grpo"}
"""Estimator -> the command with its defaults; `ppo` takes every estimator."""


def method_in_words(config: Mapping[str, Any]) -> str:
    """What a run of the stage `ppo` does, from its values: "GRPO", or "PPO from human feedback" if one of its rewards
    is a model, or none is known."""
    algorithm, rewards = config.get("algorithm"), config.get("rewards")
    estimator = tag_of(algorithm.get("estimator"), "gae") if isinstance(algorithm, Mapping) else None
    sources = rewards.values() if isinstance(rewards, Mapping) else ()
    learned = not sources or any(isinstance(source, Mapping) and source.get("type") == "model" for source in sources)
    return METHODS.get(str(estimator), METHODS["gae"]) + (" from human feedback" if learned else "")


class KLConfig(Section):
    """Penalty for leaving the reference model (Ziegler et al. 2019, eq. 2; in the loss: Shao et al. 2024, eq. 3)."""

    placement: Literal["reward", "loss"] = "reward"
    """Where the penalty applies: in the token rewards, or as a term of the policy's loss. Group estimators
    (reinforce_baseline, rloo, grpo, dr_grpo, gdpo) default to loss, so that the penalty is not compared between
    samples."""
    coef: float = Field(0.05, ge=0)
    """Coefficient β; TRL's PPO default."""
    kind: Literal["fixed", "adaptive"] = "fixed"
    """"adaptive" moves β towards `target` (Ziegler et al. 2019, section 2.2)."""
    target: float = Field(6.0, gt=0)
    """Sequence KL in nats that the adaptive controller aims at (Ziegler et al. 2019; TRL had 6 up to 0.11)."""
    horizon: int = Field(10_000, ge=1)
    """Samples over which the adaptive controller corrects the error (Ziegler et al. 2019: 10000)."""
    unbiased: bool = True
    """In the loss, multiply each token's penalty by the probability ratio, whose gradient makes the penalty's the
    unbiased one of the reverse KL (DeepSeek-V3.2, 2025; the default of TRL 1.16)."""
    estimator: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Per-token estimator (Schulman 2020, "Approximating KL divergence"); k1 is the unbiased log-ratio. In the loss the
    default is k3, as in GRPO. The gradient of k1 is zero on average there unless it is `unbiased`, so it is refused."""


class DynamicSamplingConfig(Section):
    """Dynamic sampling (DAPO, Yu et al. 2025): prompts whose samples all have the same score teach nothing, so others
    are drawn in their place until the batch is whole."""

    max_batches: int = Field(10, ge=2)
    """How often prompts are drawn for a place of the batch; the last ones are trained on whatever their scores are (10
    in NeMo-RL and in verl's documentation, 30 in SkyRL). So a step generates at most so many batches."""


class AlgorithmConfig(Section):
    """Proximal policy optimisation (Schulman et al. 2017) for token sequences."""

    preset: Literal["ppo", "grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_pp"] | None = None
    """Recipe of a paper that fills in what is not set, here and in `coordinator`; `rlhf-ray presets` lists them with
    the source of each value."""
    estimator: EstimatorConfig = Field(default_factory=GAEEstimator)
    """Advantage estimator: its name, or a section with `type` and the fields below. gae uses a critic (Schulman et al.
    2016); the others do not. reinforce (discounted returns) and reinforce_pp (whitened) need one sample per prompt;
    reinforce_baseline, rloo, grpo, dr_grpo and gdpo (several rewards) compare a prompt's samples."""
    loss: LossConfig = Field(default_factory=ClipLoss)
    """Loss of the policy: its name, or a section with `type` and the fields below. clip is PPO's clipped surrogate,
    cispo a weighted log-likelihood in which no token loses its gradient."""
    epochs: int = Field(2, ge=1)
    """Passes over each batch of experience (TRL 4, OpenRLHF 1; InstructGPT 1)."""
    mini_batches: int = Field(4, ge=1)
    """Optimizer steps per pass; must divide the samples of a step."""
    target_kl: float | None = Field(None, gt=0)
    """End a step's policy updates before an optimizer step whose mini-batch has a mean KL (k3, nats per token) from the
    policy before the update above this; the first is always made. With critic.backbone=policy this ends the critic's
    updates too. Off if empty. Spinning Up and Stable-Baselines3, which have the same field, stop at 1.5 times its value
    (Spinning Up: 0.01)."""
    old_logprobs: Literal["policy", "generator"] = "policy"
    """Denominator of the ratio: the policy's own log-probabilities in a pass before the update, or those of the
    generators (without that pass: verl's bypass mode, slime's use_rollout_logprobs). With stale samples the latter
    clips relative to the weights that sampled. By default generator with loss=cispo, whose ratio is defined so."""
    importance: ImportanceConfig = Field(default_factory=ImportanceConfig)
    """Weights by which stale samples are corrected."""
    value_clip: float | None = Field(0.2, gt=0)
    """Clip of the value change around the old value (PPO2); off when empty."""
    value_coef: float = Field(0.1, gt=0)
    """Weight of the value loss in the sum of both losses, if one model is policy and critic (critic.backbone): c1 of
    Schulman et al. 2017, eq. 9; 0.1 in TRL, whose value loss has the same factor of 1/2."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus; 0 as in most RLHF work."""
    aggregate: Literal["token", "sequence"] = "token"
    """Losses of policy and critic are means over all response tokens, or means of the rows' means."""
    reward_normalisation: Literal["none", "scale", "standardise"] = "none"
    """Divide scores by their standard deviation over all earlier steps (scale), after subtracting their mean
    (standardise). Scores of the first step are not changed."""
    reward_clip: float | None = Field(None, gt=0)
    """Clip scores to ± this before they become token rewards (many use 5 or 10); off when empty."""
    missing_eos_penalty: float | None = Field(None, ge=0)
    """Subtracted from the score of a response that has not ended, with a stop token or a stop string (TRL: 1.0 in its
    examples), or of an episode that did not complete; off if empty."""
    overlong_buffer: int | None = Field(None, ge=1)
    """Number of tokens before generator.sampling.max_tokens over which a length penalty grows linearly (DAPO, Yu et al.
    2025, soft overlong punishment); off if empty. Of an episode, the sampled tokens count, up to
    environments.NAME.max_tokens."""
    overlong_penalty: float = Field(1.0, gt=0)
    """Subtracted from the score of a response of maximum length, with `overlong_buffer` (DAPO: 1)."""
    overlong_filter: bool = False
    """Leave truncated responses, and episodes that did not complete, out of the losses, with a mask of 0: neither the
    sum nor the mean's denominator has their tokens (TRL's mask_truncated_completions, SkyRL, NeMo-RL; off in all of
    them). Their scores still count for their prompt's other samples."""
    critic_warmup_steps: int = Field(0, ge=0)
    """Number of first steps in which only the critic is trained (verl's critic_warmup)."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Train only on prompts whose samples differ in score, as it is before penalties and normalisation; `true` takes
    the defaults. Batches stay whole, and more prompts are visited than trained on, so `run.epochs` gives the largest
    number of steps then. Off if empty."""
    kl: KLConfig = Field(default_factory=KLConfig)
    """KL penalty towards the reference."""

    @field_validator("dynamic_sampling", mode="before")
    @classmethod
    def _on_or_off(cls, given: Any) -> Any:
        """`true` is a section without keys, `false` none; on the command line they are text."""
        if given is True or given == "true":
            return {}
        if given is False or given == "false":
            return None
        return given

    @property
    def method(self) -> str:
        """What the training is called: PPO, GRPO, ..."""
        return self.estimator.method

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained."""
        return isinstance(self.estimator, GAEEstimator)

    @property
    def warmup_steps(self) -> int:
        """First steps in which the policy is not trained; none without a critic that could be alone."""
        return self.critic_warmup_steps if self.has_critic else 0

    @property
    def compares_groups(self) -> bool:
        """Whether the estimator needs several samples per prompt."""
        return self.estimator.compares_groups

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened over the batch."""
        return self.estimator.always_whitens or getattr(self.estimator, "whiten", False)

    @property
    def gamma(self) -> float:
        """Discount per token; 1 for estimators that compare whole responses."""
        return self.estimator.gamma if isinstance(self.estimator, DiscountingEstimator) else 1.0

    @property
    def kl_in_loss(self) -> bool:
        """Whether the KL penalty is a term of the policy's loss, not of the rewards."""
        return self.kl.placement == "loss"

    @model_validator(mode="before")
    @classmethod
    def _defaults_that_follow(cls, given: Any) -> Any:
        """Fill in the defaults that depend on other fields, so that the saved configuration contains them."""
        if not isinstance(given, dict):
            return given
        default = cls.model_fields["estimator"].get_default(call_default_factory=True).type
        cls._check_preset(given)
        filled = {"estimator": default, **fill(given, given.get("preset"), inside="algorithm")}
        cispo = tag_of(filled.get("loss"), "clip") == "cispo"
        if cispo:
            filled.setdefault("old_logprobs", "generator")
        if (kl := as_set(filled.get("kl", {}))) is not None:
            grouped = tag_of(filled["estimator"], default) in GROUP_ESTIMATORS
            kl.setdefault("placement", "loss" if grouped else "reward")
            kl.setdefault("estimator", "k3" if kl["placement"] == "loss" else "k1")
            filled["kl"] = kl
        if (importance := as_set(filled.get("importance", {}))) is not None:
            weighted = not cispo and filled.get("old_logprobs") != "generator"
            importance.setdefault("tokens", "truncate" if weighted else "none")
            filled["importance"] = importance
        return filled

    @classmethod
    def _own_estimators(cls) -> list[str]:
        """The types that this class takes: of a command that is named after an estimator, that one."""
        return [str(type_tag(member)) for member in sections_of(cls.model_fields["estimator"].annotation)]

    @classmethod
    def _check_preset(cls, given: dict[str, Any]) -> None:
        """Neither what is set nor the command is of another estimator than the preset's."""
        preset, own = given.get("preset"), cls._own_estimators()
        if not isinstance(preset, str) or preset not in PRESETS:
            return
        wanted = PRESETS[preset].estimator
        chosen = tag_of(given.get("estimator", {}), wanted)
        if wanted not in own:
            raise ValueError(f"preset={preset} trains with estimator={wanted}, which contradicts "
                             f"`rlhf-ray {COMMAND_OF[own[0]]}`; use {_command_of(wanted)}")
        if chosen in METHODS and chosen != wanted:
            raise ValueError(f"preset={preset} trains with estimator={wanted}, which contradicts estimator={chosen}; "
                             "leave one of them out")

    @field_validator("estimator", mode="before")
    @classmethod
    def _estimator_of_the_command(cls, given: Any) -> Any:
        """The commands that are named after an estimator take no other one."""
        own = cls._own_estimators()
        named = tag_of(given, own[0])
        if len(own) == 1 and named in METHODS and named not in own:
            raise ValueError(f"estimator={named} contradicts `rlhf-ray {COMMAND_OF[own[0]]}`, which trains with "
                             f"estimator={own[0]}; leave it out, or use {_command_of(named)}")
        return given

    @model_validator(mode="after")
    def _penalises(self) -> "AlgorithmConfig":
        if self.kl_in_loss and self.kl.estimator == "k1" and self.kl.coef and not self.kl.unbiased:
            raise ValueError("kl.estimator=k1 with kl.placement=loss penalises nothing: its gradient is the policy's "
                             "score function, zero on average; use k3 (or k2), kl.unbiased=true, or "
                             "kl.placement=reward")
        if self.kl.kind == "adaptive" and self.kl.coef == 0:
            raise ValueError("kl.kind=adaptive multiplies the coefficient, so kl.coef=0 would stay 0; make it positive")
        return self

    @model_validator(mode="after")
    def _weights_once(self) -> "AlgorithmConfig":
        importance = self.importance
        asked = f"importance.masks={importance.masks}" if importance.masks else f"importance.tokens={importance.tokens}"
        remedy = "leave importance.masks out" if importance.masks else "set importance.tokens=none"
        if importance.acts and isinstance(self.loss, CISPOLoss):
            raise ValueError(f"{asked} with loss=cispo would weight tokens twice: its own ratio, between min_ratio and "
                             f"max_ratio, is the weight; {remedy}, or use loss=clip")
        if importance.acts and self.old_logprobs == "generator":
            raise ValueError(f"{asked} compares the policy's old with the generator's probability, which are equal "
                             f"with old_logprobs=generator; {remedy}, or old_logprobs=policy")
        return self


def _command_of(estimator: str) -> str:
    """The command that trains with an estimator, for messages."""
    if estimator in COMMAND_OF:
        return f"`rlhf-ray {COMMAND_OF[estimator]}`"
    return "`rlhf-ray ppo`, which takes them all"


class GRPOPenalty(KLConfig):
    """As `KLConfig`, off by default."""

    coef: float = Field(0.0, ge=0)
    """Coefficient β; 0, as in TRL's GRPO and slime (DeepSeekMath: 0.04, verl: 0.001), so that no reference is
    started."""


class GRPOAlgorithm(AlgorithmConfig):
    """Group relative policy optimisation (Shao et al. 2024)."""

    estimator: Annotated[GRPOEstimator, one_of(ESTIMATORS, "grpo")] = Field(default_factory=GRPOEstimator)
    """Advantage estimator: a score minus the mean of its prompt's scores, over their standard deviation."""
    epochs: int = Field(1, ge=1)
    """Passes over each batch of experience (1 in DeepSeekMath, TRL, verl)."""
    kl: GRPOPenalty = Field(default_factory=GRPOPenalty)
    """KL penalty towards the reference."""


class RLOOAlgorithm(AlgorithmConfig):
    """REINFORCE leave-one-out (Kool et al. 2019, Ahmadian et al. 2024)."""

    estimator: Annotated[RLOOEstimator, one_of(ESTIMATORS, "rloo")] = Field(default_factory=RLOOEstimator)
    """Advantage estimator: a score minus the mean of the prompt's other scores."""
    epochs: int = Field(1, ge=1)
    """Passes over each batch of experience (1 in Ahmadian et al. 2024 and TRL)."""


class ReinforceAlgorithm(AlgorithmConfig):
    """REINFORCE (Williams 1992)."""

    estimator: Annotated[ReinforceEstimator, one_of(ESTIMATORS, "reinforce")] = Field(
        default_factory=ReinforceEstimator)
    """Advantage estimator: the discounted return."""
    epochs: int = Field(1, ge=1)
    """Passes over each batch of experience (1 in Williams 1992 and OpenRLHF)."""


class TextsSource(MixedSource):
    """Pretraining text of a mix."""

    column: str | None = None
    """Column that holds the text."""


class PtxConfig(DataSection):
    """PPO-ptx (Ouyang et al. 2022, eq. 2): a language-modelling loss on pretraining text is added to the policy's loss
    in every optimizer step, against forgetting."""

    SECTION = "ptx"
    COLUMNS = ("column",)

    mix: list[TextsSource] = Field(default_factory=list)
    """Several data sets in place of `path`, visited in turns that follow their weights."""
    column: str = "text"
    """Column that holds the text."""
    max_tokens: int = Field(512, ge=2)
    """Longer texts are cut into rows of this many tokens; nothing is left out."""
    batch_size: int = Field(32, ge=1)
    """Rows of one optimizer step, over all ranks; as many as the samples of a mini-batch by default (OpenRLHF 0.5;
    Ouyang et al. 2022 took 8 times as many)."""
    coef: float = Field(0.05, ge=0)
    """Weight of the text's mean loss per token (OpenRLHF 0.5, whose two losses are means over tokens like ours;
    InstructGPT's 27.8 belongs to an unpublished normalisation). 0 only measures the loss."""
