"""The learner of the critic: values of states, clipped value updates."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rlhf_ray.algorithms.losses import value_loss, value_stats
from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.derived import Derived
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.stages import CriticConfig, PPOConfig
from rlhf_ray.engine.deepspeed_engine import StepResult
from rlhf_ray.models.loading import has_scalar_head, load_scalar_model, remove_dropout
from rlhf_ray.models.packed_model import PackedScalarModel, values_before_tokens
from rlhf_ray.records import Batch, Experience, Rollout, TokenScores, UpdateStats
from rlhf_ray.roles.micro_batch import AverageMeter, MicroBatch, PartLoss
from rlhf_ray.roles.ppo_update import ChosenRows, PPOLearner, Update, counted_tokens, run_update, training_batch


class CriticLearner(PPOLearner):
    """One rank of the critic."""

    config: CriticConfig
    model_config: ModelConfig

    def __init__(self, config: CriticConfig, model: ModelConfig, rank: int, world: int, seed: int, total_steps: int,
                 algorithm: AlgorithmConfig, longest: int | None = None) -> None:
        super().__init__(config, model, rank, world, seed, total_steps, longest)
        self.algorithm = algorithm
        self.head_dropout = config.head_dropout

    @staticmethod
    def arguments(config: PPOConfig, derived: Derived, rank: int) -> Mapping[str, Any]:
        """Arguments of a rank in a run."""
        return {
            **PPOLearner.common_arguments(config, config.critic, rank, config.run.steps),
            "model": derived.critic_model,
            "longest": derived.longest_sample,
        }

    def build(self) -> PackedScalarModel:
        """A scalar model: the reward model or the value model that `critic` names, with its own head, or the weights
        of a language model with a new one."""
        named = self.config.path is not None
        new_head = not has_scalar_head(self.model_config) if named else self.config.init == "policy"
        model = load_scalar_model(self.model_config, new_head=new_head, mapped=self.mapped)
        return PackedScalarModel(remove_dropout(model), self.head_dropout)

    def values(self, *rollouts: Rollout) -> TokenScores:
        """Values of the states before the response tokens, for this rank's contiguous share of all rows."""
        return self.score(rollouts, lambda micro: [
            values_before_tokens(self.engine.infer(micro.tokens, micro.packing), micro.predicted)])[0]

    def update(self, step: int, *experiences: Experience) -> UpdateStats:
        """Clipped value updates on one batch of experience; errors as in `run_update`."""
        batch = training_batch(experiences, whiten=False)
        stats = run_update(self, batch, step)
        stats.metrics.update(value_metrics(batch))
        return stats

    def optimize(self, mini_batch: Batch, chosen: ChosenRows, update: Update, meter: AverageMeter) -> StepResult:
        """One optimizer step; it depends on the mini-batch alone."""
        for share in self.shares(mini_batch, self.loss, meter, chosen.passed, chosen.counted):
            self.engine.backward(share)
        return self.engine.step()

    def loss(self, part: Batch) -> PartLoss:
        """PPO2's clipped squared error of some rows."""
        micro = MicroBatch(part, self.engine.device)
        values = values_before_tokens(self.engine.forward(micro.tokens, micro.packing), micro.predicted)
        return value_objective(micro, values, self.algorithm)


def value_objective(micro: MicroBatch, values: Tensor, algorithm: AlgorithmConfig) -> PartLoss:
    """The critic's loss of `[n]` values of the states before the response tokens."""
    columns = (micro.lay_out(values), micro.grid("values"), micro.grid("returns"), micro.mask, algorithm.value_clip)
    loss = value_loss(*columns, algorithm.aggregate, micro.row_weights)
    return PartLoss(loss, {"loss": loss.detach()}, micro.response_tokens, value_stats(*columns))


def value_metrics(batch: Batch) -> dict[str, float]:
    """Means and variances over a batch's response tokens: return_mean, return_variance, value_variance (of the values
    from before the update), and explained_variance, 1 - Var(return - value) / Var(return), 0 for constant returns.

    Raises:
        ValueError: the batch has no values.
    """
    if batch.values is None:
        raise ValueError("explained variance needs a critic's values, and the batch has none")
    counted = counted_tokens(batch)
    returns = batch.returns[counted]
    values = batch.values[counted]
    spread = float(returns.var())
    return {
        "return_mean": float(returns.mean()), "return_variance": spread, "value_variance": float(values.var()),
        "explained_variance": 1 - float((returns - values).var()) / spread if spread > 0 else 0.0,
    }
