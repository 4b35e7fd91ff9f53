"""Hyperparameters of PPO. Each field names the source of its default."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from rlhf_ray.config.data import DataSection, MixedSource
from rlhf_ray.config.section import Section

Estimator = Literal["gae", "reinforce", "reinforce_pp", "reinforce_baseline", "rloo", "grpo", "dr_grpo"]
OldLogprobs = Literal["policy", "update", "generator"]
"""Source of the denominator of the ratio: a forward pass before the update, the update's own, or the generators."""
GROUP_ESTIMATORS = ("reinforce_baseline", "rloo", "grpo", "dr_grpo")
"""Estimators that compare a sample with the other samples of its prompt."""
WHITENED_ESTIMATORS = ("gae", "reinforce_pp")
"""Estimators whose advantages are whitened over the batch by default."""
METHODS = {"gae": "PPO", "reinforce": "REINFORCE", "reinforce_pp": "REINFORCE++",
           "reinforce_baseline": "REINFORCE++-baseline", "rloo": "RLOO", "grpo": "GRPO", "dr_grpo": "Dr. GRPO"}
"""Estimator -> what its papers call the training with it."""
COMMAND_OF = {"gae": "ppo", "reinforce": "reinforce", "rloo": "rloo", "grpo": "grpo"}
"""Estimator -> the command with its defaults; `ppo` takes every estimator."""


def method_in_words(config: Mapping[str, Any]) -> str:
    """What a run of the stage `ppo` does, from its values: "GRPO", or "PPO from human feedback" if one of its rewards
    is a model, or none is known."""
    algorithm, rewards = config.get("algorithm"), config.get("rewards")
    estimator = algorithm.get("estimator") if isinstance(algorithm, Mapping) else None
    sources = rewards.values() if isinstance(rewards, Mapping) else ()
    learned = not sources or any(isinstance(source, Mapping) and source.get("type") == "model" for source in sources)
    return METHODS.get(str(estimator), METHODS["gae"]) + (" from human feedback" if learned else "")


class KLConfig(Section):
    """Penalty for leaving the reference model (Ziegler et al. 2019, eq. 2; in the loss: Shao et al. 2024, eq. 3)."""

    placement: Literal["reward", "loss"] = "reward"
    """Where the penalty applies: in the token rewards, or as a term of the policy's loss. Group estimators
    (reinforce_baseline, rloo, grpo, dr_grpo) default to loss, so that the penalty is not compared between samples."""
    coef: float = Field(0.05, ge=0)
    """Coefficient β; TRL's PPO default."""
    kind: Literal["fixed", "adaptive"] = "fixed"
    """"adaptive" moves β towards `target` (Ziegler et al. 2019, section 2.2)."""
    target: float = Field(6.0, gt=0)
    """Sequence KL in nats that the adaptive controller aims at (Ziegler et al. 2019; TRL had 6 up to 0.11)."""
    horizon: int = Field(10_000, ge=1)
    """Samples over which the adaptive controller corrects the error (Ziegler et al. 2019: 10000)."""
    estimator: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Per-token estimator (Schulman 2020, "Approximating KL divergence"); k1 is the unbiased log-ratio. In the loss the
    default is k3, as in GRPO: the gradient of k1 is zero on average there, so it is refused."""


class DynamicSamplingConfig(Section):
    """Dynamic sampling (DAPO, Yu et al. 2025): prompts whose samples all have the same score teach nothing, so others
    are drawn in their place until the batch is whole."""

    max_batches: int = Field(10, ge=2)
    """How often prompts are drawn for a place of the batch; the last ones are trained on whatever their scores are (10
    in NeMo-RL and verl's recipe, 30 in SkyRL). So a step generates at most so many batches."""


class AlgorithmConfig(Section):
    """Proximal policy optimisation (Schulman et al. 2017) for token sequences."""

    estimator: Estimator = "gae"
    """Advantage estimator. gae uses a critic (Schulman et al. 2016); the others do not. reinforce (discounted returns)
    and reinforce_pp (whitened) need one sample per prompt; reinforce_baseline, rloo, grpo and dr_grpo compare a
    prompt's samples."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token; 1 for language (Ziegler et al. 2019, InstructGPT)."""
    lam: float = Field(0.95, ge=0, le=1)
    """GAE's λ (Schulman et al. 2016; 0.95 in InstructGPT, TRL)."""
    lam_alpha: float | None = Field(None, gt=0)
    """Length-adaptive λ of each response in place of `lam`: 1 - 1 / (α length) (VAPO, Yue et al. 2025: 0.05); off when
    empty."""
    lam_critic: float | None = Field(None, ge=0, le=1)
    """λ of the returns that the critic learns (VAPO: 1); that of the advantages if empty."""
    epochs: int = Field(2, ge=1)
    """Passes over each batch of experience (TRL 4, OpenRLHF 1; InstructGPT 1)."""
    mini_batches: int = Field(4, ge=1)
    """Optimizer steps per pass; must divide the samples of a step."""
    target_kl: float | None = Field(None, gt=0)
    """End a step's policy updates before an optimizer step whose mini-batch has a mean KL (k3, nats per token) from the
    policy before the update above this; the first is always made. With critic.backbone=policy this ends the critic's
    updates too. Off if empty. Spinning Up and Stable-Baselines3, which have the same field, stop at 1.5 times its value
    (Spinning Up: 0.01)."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """Lower clip of the probability ratio, 1 - clip_low (Schulman et al. 2017: 0.2)."""
    clip_high: float = Field(0.2, gt=0)
    """Upper clip of the probability ratio, 1 + clip_high (0.2; DAPO raises it to 0.28)."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound of the loss at negative advantages (Ye et al. 2020; verl uses 3); off when empty."""
    ratio: Literal["token", "sequence"] = "token"
    """Probability ratio per token (PPO), or per response: the geometric mean of its tokens' (GSPO, Zheng et al.
    2025, which clips at 3e-4 and 4e-4 and aggregates by sequence)."""
    old_logprobs: Literal["policy", "generator"] = "policy"
    """Denominator of the ratio: the policy's own log-probabilities in a pass before the update, or those of the
    generators (without that pass: verl's bypass mode, slime's use_rollout_logprobs). With stale samples the latter
    clips relative to the weights that sampled."""
    importance: Literal["none", "truncate", "mask"] = "truncate"
    """Weight tokens by the learner's over the generator's probability, to correct for stale samples and numerical
    differences between engines: weights above the cap are truncated (Yao et al. 2025; the default of TRL's GRPO), or
    their tokens are masked. By default none with old_logprobs=generator, which sets the two equal."""
    importance_cap: float = Field(2.0, gt=0)
    """Largest importance weight (2 in verl, 3 in TRL)."""
    importance_level: Literal["token", "sequence"] = "token"
    """One weight per token, or one per response: the product of its tokens' weights (exact, but of high variance)."""
    value_clip: float | None = Field(0.2, gt=0)
    """Clip of the value change around the old value (PPO2); off when empty."""
    value_coef: float = Field(0.1, gt=0)
    """Weight of the value loss in the sum of both losses, if one model is policy and critic (critic.backbone): c1 of
    Schulman et al. 2017, eq. 9; 0.1 in TRL, whose value loss has the same factor of 1/2."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus; 0 as in most RLHF work."""
    aggregate: Literal["token", "sequence"] = "token"
    """Losses of policy and critic are means over all response tokens, or means of the rows' means."""
    whiten_advantages: bool = True
    """Whiten advantages over the whole batch's response tokens; by default with gae and reinforce_pp only."""
    reward_normalisation: Literal["none", "scale", "standardise"] = "none"
    """Divide scores by their standard deviation over all earlier steps (scale), after subtracting their mean
    (standardise). Scores of the first step are not changed."""
    reward_clip: float | None = Field(None, gt=0)
    """Clip scores to ± this before they become token rewards (many use 5 or 10); off when empty."""
    missing_eos_penalty: float | None = Field(None, ge=0)
    """Subtracted from the score of a response that has not ended, with a stop token or a stop string (TRL: 1.0 in its
    examples); off if empty."""
    overlong_buffer: int | None = Field(None, ge=1)
    """Number of tokens before generator.sampling.max_tokens over which a length penalty grows linearly (DAPO, Yu et al.
    2025, soft overlong punishment); off if empty."""
    overlong_penalty: float = Field(1.0, gt=0)
    """Subtracted from the score of a response of maximum length, with `overlong_buffer` (DAPO: 1)."""
    critic_warmup_steps: int = Field(0, ge=0)
    """Number of first steps in which only the critic is trained (verl's critic_warmup)."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Train only on prompts whose samples differ in score, as it is before penalties and normalisation; `true` takes
    the defaults. Batches stay whole, and more prompts are visited than trained on. Off if empty."""
    kl: KLConfig = Field(default_factory=KLConfig)
    """KL penalty towards the reference."""

    @field_validator("dynamic_sampling", mode="before")
    @classmethod
    def _on_or_off(cls, given: Any) -> Any:
        return {True: {}, "true": {}, False: None, "false": None}.get(given, given) if isinstance(
            given, bool | str) else given

    @property
    def method(self) -> str:
        """What the training is called: PPO, GRPO, ..."""
        return METHODS.get(self.estimator, self.estimator)

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained."""
        return self.estimator == "gae"

    @property
    def compares_groups(self) -> bool:
        """Whether the estimator needs several samples per prompt."""
        return self.estimator in GROUP_ESTIMATORS

    @property
    def kl_in_loss(self) -> bool:
        """Whether the KL penalty is a term of the policy's loss, not of the rewards."""
        return self.kl.placement == "loss"

    @model_validator(mode="before")
    @classmethod
    def _defaults_by_estimator(cls, given: Any) -> Any:
        """Fill in the defaults that depend on other fields, so that the saved configuration contains them."""
        if not isinstance(given, dict) or not isinstance(kl := given.get("kl", {}), dict | KLConfig):
            return given
        estimator = given.get("estimator", cls.model_fields["estimator"].default)
        chosen = dict(kl) if isinstance(kl, dict) else kl.model_dump(exclude_unset=True)
        chosen.setdefault("placement", "loss" if estimator in GROUP_ESTIMATORS else "reward")
        chosen.setdefault("estimator", "k3" if chosen["placement"] == "loss" else "k1")
        importance = "none" if given.get("old_logprobs") == "generator" else "truncate"
        return {"estimator": estimator, "whiten_advantages": estimator in WHITENED_ESTIMATORS, "importance": importance,
                **given, "kl": chosen}

    @field_validator("estimator", mode="before")
    @classmethod
    def _estimator_of_the_command(cls, given: Any) -> Any:
        """The commands that are named after an estimator take no other one."""
        own = get_args(cls.model_fields["estimator"].annotation)
        if len(own) == 1 and given in METHODS and given not in own:
            instead = "`rlhf-ray ppo`, which takes them all"
            if given in COMMAND_OF:
                instead = f"`rlhf-ray {COMMAND_OF[given]}`"
            raise ValueError(f"estimator={given} contradicts `rlhf-ray {COMMAND_OF[own[0]]}`, which trains with "
                             f"estimator={own[0]}; leave it out, or use {instead}")
        return given

    @model_validator(mode="after")
    def _penalises(self) -> "AlgorithmConfig":
        if self.kl.placement == "loss" and self.kl.estimator == "k1" and self.kl.coef:
            raise ValueError("kl.estimator=k1 with kl.placement=loss penalises nothing: its gradient is the policy's "
                             "score function, zero on average; use k3 (or k2), or kl.placement=reward")
        if self.kl.kind == "adaptive" and self.kl.coef == 0:
            raise ValueError("kl.kind=adaptive multiplies the coefficient, so kl.coef=0 would stay 0; make it positive")
        return self

    @model_validator(mode="after")
    def _fits_the_estimator(self) -> "AlgorithmConfig":
        if self.old_logprobs == "generator" and self.importance != "none":
            raise ValueError(f"importance={self.importance} weights tokens by the policy's old over the generator's "
                             "probability, which are equal with old_logprobs=generator; set importance=none or "
                             "old_logprobs=policy")
        if self.estimator == "reinforce_pp" and not self.whiten_advantages:
            raise ValueError("estimator=reinforce_pp is reinforce with whitened advantages; leave whiten_advantages on "
                             "or use estimator=reinforce")
        return self


class GRPOPenalty(KLConfig):
    """As `KLConfig`, off by default."""

    coef: float = Field(0.0, ge=0)
    """Coefficient β; 0, as in TRL's GRPO and slime (DeepSeekMath: 0.04, verl: 0.001), so that no reference is
    started."""


class GRPOAlgorithm(AlgorithmConfig):
    """Group relative policy optimisation (Shao et al. 2024)."""

    estimator: Literal["grpo"] = "grpo"
    """Advantage estimator: a score minus the mean of its prompt's scores, over their standard deviation."""
    epochs: int = Field(1, ge=1)
    """Passes over each batch of experience (1 in DeepSeekMath, TRL, verl)."""
    kl: GRPOPenalty = Field(default_factory=GRPOPenalty)
    """KL penalty towards the reference."""


class RLOOAlgorithm(AlgorithmConfig):
    """REINFORCE leave-one-out (Kool et al. 2019, Ahmadian et al. 2024)."""

    estimator: Literal["rloo"] = "rloo"
    """Advantage estimator: a score minus the mean of the prompt's other scores."""
    epochs: int = Field(1, ge=1)
    """Passes over each batch of experience (1 in Ahmadian et al. 2024 and TRL)."""


class ReinforceAlgorithm(AlgorithmConfig):
    """REINFORCE (Williams 1992)."""

    estimator: Literal["reinforce"] = "reinforce"
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
