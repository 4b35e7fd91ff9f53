"""Policy and critic trained as one model (`critic.backbone: policy`): one backbone, two heads, one optimizer."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from rlhf_ray.engine.parameter_shards import gather_parameter
from rlhf_ray.files.writing import write_atomically
from rlhf_ray.models.loading import load_causal_lm, remove_dropout
from rlhf_ray.models.packed_model import PackedActorCritic
from rlhf_ray.observability.owner_record import Term
from rlhf_ray.records import Batch, Experience, Rollout, TokenScores, UpdateStats
from rlhf_ray.roles.critic_learner import value_metrics, value_objective
from rlhf_ray.roles.micro_batch import MicroBatch, PartLoss
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.roles.ppo_update import Update, training_batch

CRITIC = "critic/"
"""Prefix of the critic's metrics among those of an update."""
VALUE_HEAD = "value_head.weight"
"""Name of the head's weight, in the module and in its file."""


class ActorCriticLearner(PolicyLearner):
    """One rank of the shared model.

    The loss is the policy's plus `value_coef` times the critic's (Schulman et al. 2017, eq. 9).
    """

    def build(self) -> PackedActorCritic:  # type: ignore[override]
        """The language model with a new value head."""
        model = remove_dropout(load_causal_lm(self.model_config, self.mapped))
        return PackedActorCritic(model, self.temperature, self.chunks)

    def logprobs_and_values(self, *rollouts: Rollout) -> tuple[TokenScores, TokenScores]:
        """The results of `PolicyLearner.logprobs` and `CriticLearner.values` from one forward pass."""
        logprobs, values = self.score(
            rollouts, lambda micro: self.engine.infer(
                micro.tokens, micro.packing, micro.predicted, mask=micro.sampling_mask)[::2], columns=2)
        return logprobs, values

    def update_both(self, step: int, kl_coef: float, *experiences: Experience) -> tuple[UpdateStats, UpdateStats]:
        """`PolicyLearner.update` of the shared model; returns the statistics of the policy and of the critic.

        Both contain the gradient norm and the learning rate of the one model.
        """
        both = self.update(step, kl_coef, *experiences)
        policy = {name: value for name, value in both.metrics.items() if not name.startswith(CRITIC)}
        critic = {name.removeprefix(CRITIC): value for name, value in both.metrics.items() if name.startswith(CRITIC)}
        critic |= {name: both.metrics[name] for name in ("grad_norm", "learning_rate")}
        critic |= value_metrics(training_batch(experiences, whiten=False))
        policy["total_loss"] += self.algorithm.value_coef * critic.get("loss", math.nan)
        return replace(both, metrics=policy), replace(both, metrics=critic)

    def _skips_zero_advantages(self, mini_batch: Batch) -> bool:
        """Never: the critic's loss depends on every row."""
        return False

    def loss(self, part: Batch, update: Update) -> PartLoss:
        """The sum of both losses of some rows, from one forward pass."""
        a = self.algorithm
        micro = MicroBatch(part, self.engine.device)
        logprobs, entropy, values = self.engine.forward(
            micro.tokens, micro.packing, micro.predicted, a.entropy_coef > 0, mask=micro.sampling_mask)
        policy = self.objective(micro, logprobs, entropy, update)
        critic = value_objective(micro, values, a)
        return PartLoss(
            policy.loss + a.value_coef * critic.loss, {**policy.means, **_of_critic(critic.means)},
            policy.tokens, {**policy.token_means, **_of_critic(critic.token_means)})

    def export_value_head(self, path: str, term: Term | None = None) -> None:
        """Write the value head as safetensors (rank 0; all ranks take part in gathering it); `term` as for `export`."""
        weight = self.engine.module.value_head.weight
        gathered = gather_parameter(weight).cpu()
        if self.rank == 0:
            write_value_head(gathered, Path(path), term)


def _of_critic(means: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The critic's statistics under their names in the update of both."""
    return {f"{CRITIC}{name}": value for name, value in means.items()}


def write_value_head(weight: Tensor, path: Path, term: Term | None = None) -> None:
    """Write the weight of a value head as safetensors."""
    from safetensors.torch import save

    write_atomically(path, save({VALUE_HEAD: weight.contiguous()}), term)
