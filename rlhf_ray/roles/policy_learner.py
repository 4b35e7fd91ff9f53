"""The learner of the policy: old log-probabilities, clipped policy updates, weight averages."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_ray.algorithms.logprob_gap import gap_histogram, gap_quantile
from rlhf_ray.algorithms.losses import cispo_loss, entropy_bonus, kl_penalty, policy_loss
from rlhf_ray.algorithms.masking import aggregate_mean, masked_mean
from rlhf_ray.checkpoint.model_card import ModelCardInfo
from rlhf_ray.checkpoint.state_files import save_state
from rlhf_ray.config.algorithm import AlgorithmConfig, OldLogprobs, PtxConfig
from rlhf_ray.config.derived import Derived
from rlhf_ray.config.learner import PolicyConfig
from rlhf_ray.config.losses import CISPOLoss
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.data.batching import inference_plan
from rlhf_ray.data.contents import Contents
from rlhf_ray.data.supervised_records import Sequences
from rlhf_ray.engine.deepspeed_engine import StepResult
from rlhf_ray.engine.ema import WeightAverage, average_files
from rlhf_ray.models.loading import load_causal_lm, remove_dropout
from rlhf_ray.models.model_families import sends_adapters
from rlhf_ray.models.packed_model import PackedLanguageModel
from rlhf_ray.observability.owner_record import Term
from rlhf_ray.records import Batch, Experience, GivenTokens, LearnerPass, Rollout, TokenScores, UpdateStats
from rlhf_ray.roles.learner_state import Writers
from rlhf_ray.roles.micro_batch import AverageMeter, MicroBatch, PartLoss, score_columns
from rlhf_ray.roles.ppo_update import ChosenRows, PPOLearner, Update, counted_tokens, run_update, training_batch
from rlhf_ray.roles.pretraining_mix import PretrainingMix
from rlhf_ray.weights.gathered_tensors import GatheredAdapters, GatheredTensors

GAPS = "logprob_gap_shares"
"""Statistic of the update: share of tokens in each bin of `gap_histogram`."""


class PolicyLearner(PPOLearner):
    """One rank of the policy.

    Example, of one step of PPO with one rank, without Ray::

        learner = PolicyLearner(config.policy, config.model, rank=0, world=1, seed=0, total_steps=100,
                                algorithm=config.algorithm, temperature=1.0)
        learner.start(free_address("127.0.0.1"), timeout_s=60.0)
        old_logprobs = learner.logprobs(rollout)
        stats = learner.update(0, 0.05, experience)  # assembled with them
    """

    config: PolicyConfig

    def __init__(self, config: PolicyConfig, model: ModelConfig, rank: int, world: int, seed: int, total_steps: int,
                 algorithm: AlgorithmConfig, temperature: float, old_logprobs: OldLogprobs = "policy",
                 longest: int | None = None, publishes_adapters: bool = False) -> None:
        """
        Args:
            old_logprobs: source of an update's old log-probabilities, see `Derived.old_logprobs`.
            publishes_adapters: publish the adapters alone, not weights with the adapters merged in.
        """
        super().__init__(config, model, rank, world, seed, total_steps, longest)
        self.algorithm = algorithm
        self.temperature = temperature
        self.old_logprobs = old_logprobs
        self._publishes_adapters = publishes_adapters
        self.average: WeightAverage | None = None
        self.ptx: PretrainingMix | None = None

    @staticmethod
    def arguments(config: PPOConfig, derived: Derived, rank: int) -> Mapping[str, Any]:
        """Arguments of a rank in a run. The policy makes no optimizer steps while the critic warms up."""
        longest = derived.longest_sample
        if config.ptx:
            longest = max(longest, config.ptx.max_tokens)
        steps = max(1, config.run.steps - config.algorithm.warmup_steps)
        return {
            **PPOLearner.common_arguments(config, config.policy, rank, steps),
            "model": config.model,
            "longest": longest,
            "temperature": config.generator.sampling.temperature,
            "old_logprobs": derived.old_logprobs,
            "publishes_adapters": sends_adapters(config),
        }

    def start(self, address: str, timeout_s: float) -> dict[str, Any]:
        """As `Learner.start`; the average of the weights starts at the initial weights."""
        started = super().start(address, timeout_s)
        if self.config.ema_decay is not None:
            self.average = WeightAverage(self.engine.module, self.config.ema_decay)
        if self.adapters and self.engine.compiled:
            with self.adapters.disabled():
                self.engine.try_layers(gradients=False)
        return started

    def published_tensors(self) -> GatheredTensors:
        """The adapters alone, if generators compute with them; else the model."""
        if self._publishes_adapters and self.adapters:
            return GatheredAdapters(self.engine, self.adapters, self.model_config.dtype, self.rank, self.lockstep)
        return super().published_tensors()

    def take_pretraining_text(self, config: PtxConfig, text: Sequences, sizes: Sequence[int] | None = None,
                              contents: Contents | None = None) -> None:
        """Mix these rows into every optimizer step from now on; arguments as for `PretrainingMix`."""
        self.ptx = PretrainingMix(config, text, self.seed, sizes, contents)

    def build(self) -> PackedLanguageModel:
        """The language model, which returns log-probabilities at the sampling temperature."""
        model = remove_dropout(load_causal_lm(self.model_config, self.mapped))
        return PackedLanguageModel(model, self.temperature, self.chunks)

    def logprobs(self, *rollouts: Rollout) -> TokenScores:
        """Log-probabilities of this rank's contiguous share (`inference_plan`) of all rows, under current weights."""
        return self.score(
            rollouts, lambda micro: self.engine.infer(
                micro.tokens, micro.packing, micro.predicted, mask=micro.sampling_mask)[:1])[0]

    def given_logprobs(self, rows: GivenTokens) -> LearnerPass | None:
        """Log-probabilities of given tokens under the current weights at temperature 1. Every rank makes all passes if
        they are collective calls; otherwise the first one alone, and the others return None."""
        if self.rank and not self.lockstep:
            return None
        halves = "bfloat16" in (self._published_as.dtype, self.model_config.dtype, self.config.autocast)
        precision = torch.bfloat16 if halves else torch.float32
        # Merged weights in bfloat16 may lose all that adapters add to them.
        loses_adapters = halves and self.adapters is not None and not self._publishes_adapters

        def forward(micro: MicroBatch) -> list[Tensor]:
            given: Any = micro.tokens, micro.packing, micro.predicted
            exact = self.engine.infer(*given, temperature=1.0)[0]
            with self.adapters.disabled() if self.adapters and loses_adapters else nullcontext():
                return [exact, self.engine.infer_rounded(precision, *given, temperature=1.0)[0]]

        plan = inference_plan(rows.lengths, self.config.micro_batch_tokens)
        exact, rounded = (column.values[rows.response_mask]
                          for column in score_columns(rows, plan, self.engine.device, forward, columns=2))
        self.engine.release_gathered()
        return LearnerPass(exact, rounded, str(precision).removeprefix("torch."))

    def reference_logprobs(self, *rollouts: Rollout) -> TokenScores:
        """The same under the adapters' frozen base, which is the model that the policy started from.

        Raises:
            ValueError: the model is trained without adapters, so its initial weights are not kept.
        """
        if self.adapters is None:
            raise ValueError("without adapters the initial weights are not kept; set `lora`, or use a reference model")
        with self.adapters.disabled():
            return self.logprobs(*rollouts)

    def update(self, step: int, kl_coef: float, *experiences: Experience) -> UpdateStats:
        """Clipped policy updates on one batch of experience; errors as in `run_update`.

        Args:
            kl_coef: current coefficient of the KL penalty, for a penalty in the loss.
        """
        batch = training_batch(experiences, self.algorithm.whitens, self.algorithm.overlong_filter)
        stats = run_update(self, batch, step, kl_coef)

        # Metrics that follow from those of the steps, or from the batch.
        if gaps := [stats.metrics.pop(name) for name in list(stats.metrics) if name.startswith(GAPS)]:
            stats.metrics["logprob_gap_p99"] = gap_quantile(gaps, 0.99)
        # Without an entropy bonus, report the sampled entropy, which costs nothing: minus the mean log-probability.
        stats.metrics.setdefault("entropy", -_mean(batch.old_logprobs[counted_tokens(batch)]))
        stats.metrics["advantage_mean"] = _mean(np.concatenate([  # of the batch it is 0 if whitened
            part.advantages[counted_tokens(part)] for part in experiences]))
        text = self.ptx.config.coef * stats.metrics.get("ptx_loss", math.nan) if self.ptx else 0.0
        stats.metrics["total_loss"] = stats.metrics.get("loss", math.nan) + text  # no step may have been applied
        if self.algorithm.target_kl is not None:
            stats.metrics["optimizer_steps"] = float(stats.applied)
        return stats

    def chosen_rows(self, mini_batch: Batch) -> ChosenRows:
        """As `PPOLearner.chosen_rows`. Rows whose advantages are all exactly 0 count, but are not passed, where their
        loss and its gradient are 0 in any case (prime-rl, Open-Instruct). One row is always passed, so that every
        mini-batch has statistics."""
        chosen = super().chosen_rows(mini_batch)
        if not self._skips_zero_advantages(mini_batch) or not len(chosen.counted):
            return chosen
        nonzero = np.logical_or.reduceat(mini_batch.advantages != 0, mini_batch.offsets[:-1])
        passed = chosen.counted[nonzero[chosen.counted]]
        if not len(passed):
            passed = chosen.counted[[int(mini_batch.lengths[chosen.counted].argmin())]]
        return ChosenRows(passed, chosen.counted)

    def _skips_zero_advantages(self, mini_batch: Batch) -> bool:
        """Whether nothing but the advantages gives rows a part in the update: neither a KL penalty (or its measurement)
        nor an entropy bonus in the loss, no routers to balance, and no target of a KL over all tokens."""
        a = self.algorithm
        penalised = a.kl_in_loss and mini_batch.reference_logprobs is not None
        return not (penalised or a.entropy_coef or a.target_kl is not None or self.config.router_aux_loss_coef)

    def optimize(
        self, mini_batch: Batch, chosen: ChosenRows, update: Update, meter: AverageMeter
    ) -> StepResult | None:
        """One optimizer step, with pretraining text if configured; updates the average of the weights. The loss that is
        reported is that of all rows that count, other statistics are means over the tokens of those that are passed.

        With `algorithm.target_kl`, every step but the update's first is left out, and ends the update, if the
        mini-batch's KL from the policy before the update is above it.
        """
        # The policy's loss.
        own = AverageMeter()
        for share in self.shares(
                mini_batch, lambda part: self.loss(part, update), own, chosen.passed, chosen.counted):
            self.engine.backward(share)
        if self._skips_zero_advantages(mini_batch):
            self._add_left_out(mini_batch, chosen, own)
        ends_update = self._beyond_target(update, own)
        meter.merge(own)

        # The text's. It is read in a step that is left out too, so that its position follows from the mini-batches.
        if self.ptx:
            self.ptx.backward(self, meter)

        # The step, on all ranks or on none.
        if ends_update:
            self.engine.drop_gradients()
            return None
        result = self.engine.step()
        if self.average and result.applied:
            self.average.update()
        return result

    def _add_left_out(self, mini_batch: Batch, chosen: ChosenRows, meter: AverageMeter) -> None:
        """The loss of 0 of the rows that count without being passed, and their share. All ranks know them; one adds its
        numbers, the others nothing, since the means are those of all ranks."""
        left_out = np.setdiff1d(chosen.counted, chosen.passed)
        share = torch.tensor(len(left_out) / max(len(chosen.counted), 1), device=self.engine.device)
        adds = self.rank == 0
        meter.add(len(chosen.counted) if adds else 0, {"zero_advantage_rows": share})
        if len(left_out):
            meter.add(self.count(mini_batch.select(left_out)) if adds else 0, {"loss": torch.zeros_like(share)})

    def _beyond_target(self, update: Update, meter: AverageMeter) -> bool:
        """Whether the KL of a mini-batch's rows, over all ranks, is above `algorithm.target_kl`. A collective call in
        all steps but those before the weights first change, when the ratio differs from 1 only by dropout and by what
        generators compute differently."""
        target = self.algorithm.target_kl
        if target is None or not update.applied:
            return False
        return meter.means()["approx_kl"] > target

    def loss(self, part: Batch, update: Update) -> PartLoss:
        """PPO's clipped loss of some rows, with the KL penalty and the entropy bonus if the loss includes them."""
        micro = MicroBatch(part, self.engine.device)
        logprobs, entropy = self.engine.forward(
            micro.tokens, micro.packing, micro.predicted, self.algorithm.entropy_coef > 0, mask=micro.sampling_mask)
        return self.objective(micro, logprobs, entropy, update)

    def objective(self, micro: MicroBatch, logprobs: Tensor, entropy: Tensor | None, update: Update) -> PartLoss:
        """The loss from `[n]` log-probabilities and entropies (None without a bonus) at the response tokens."""
        a = self.algorithm
        new = micro.lay_out(logprobs)

        # The loss of the ratio.
        old = new.detach() if self.old_logprobs == "update" else micro.grid("old_logprobs")
        loss, stats = self._ratio_loss(micro, new, old)

        # The gap to the generators, while the weights are those that they sampled with.
        if self.old_logprobs != "policy" and not update.applied:
            behaviour = micro.grid("behaviour_logprobs")
            stats["logprob_gap"] = masked_mean((new.detach() - behaviour).abs(), micro.mask)
            stats[GAPS] = gap_histogram(new.detach(), behaviour, micro.mask) / micro.mask.sum().clamp(min=1)

        # The KL penalty.
        if a.kl_in_loss and micro.record.reference_logprobs is not None:
            kl = kl_penalty(new, micro.grid("reference_logprobs"), micro.mask, a.kl.estimator,
                            old if a.kl.unbiased else None)
            stats["kl_penalty"] = masked_mean(kl.detach(), micro.mask)
            if update.kl_coef:  # otherwise it is only measured, and an infinite one must not become NaN in the loss
                loss = loss + update.kl_coef * aggregate_mean(kl, micro.mask, a.aggregate, micro.row_weights)

        # The entropy bonus, aggregated as the policy loss is, so that micro-batches' parts add up to the whole.
        if entropy is not None:
            grid = micro.lay_out(entropy)
            stats["entropy"] = entropy_bonus(grid.detach(), micro.mask)
            loss = loss - a.entropy_coef * aggregate_mean(grid, micro.mask, a.aggregate, micro.row_weights)
        return PartLoss(loss, {"loss": loss.detach()}, micro.response_tokens, stats)

    def _ratio_loss(self, micro: MicroBatch, new: Tensor, old: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss that `algorithm.loss` chooses, with importance weights if configured, and its statistics."""
        a = self.algorithm
        columns = (new, old, micro.grid("advantages"), micro.mask)
        if isinstance(a.loss, CISPOLoss):
            return cispo_loss(*columns, a.loss.max_ratio, a.loss.min_ratio, a.aggregate, micro.row_weights)
        i = a.importance
        importance: dict[str, Any] = {} if not i.acts else {
            "behaviour_logprobs": micro.grid("behaviour_logprobs"), "is_cap": i.cap, "importance": i.tokens,
            "importance_level": i.level, "band": i.band, "masks": i.masks, "geometric": i.geometric,
            "outlier": i.outlier,
        }
        return policy_loss(
            *columns, a.loss.clip_low, a.loss.clip_high, a.loss.dual_clip, aggregate=a.aggregate, ratio=a.loss.ratio,
            row_weights=micro.row_weights, **importance)

    def export_average(self, directory: str, card: ModelCardInfo, term: Term | None = None) -> None:
        """Write the average of the weights as `export` writes the weights; requires `policy.ema_decay`."""
        average = self.average
        if average is None:
            raise ValueError("there is no average to export: set policy.ema_decay")
        self.whole_model.export(directory, card, term, lambda names, wanted: average.gather(
            names, wanted, self.engine.gather))

    def copies(self) -> Writers:
        """The average of the weights and the position in the pretraining text."""
        files: dict[str, Callable[[Path], object]] = {}
        if self.average:
            files[f"average_{self.rank}.pt"] = partial(torch.save, self.average.copy())
        if self.ptx and self.rank == 0:
            files["ptx_0.json"] = partial(save_state, state=self.ptx.state_dict())
        return files

    def load(self, directory: str) -> None:
        """As `Learner.load`; errors also as in `WeightAverage.load` and `PretrainingMix.load`."""
        super().load(directory)
        path = Path(directory)
        if self.average:
            self.average.load(*average_files(path))
        if self.ptx:
            self.ptx.load(path / "ptx_0.json")  # the same on all ranks


def _mean(numbers: NDArray[np.float32]) -> float:
    """Their mean; NaN without any, as where all episodes are masked."""
    return float(numbers.mean()) if len(numbers) else math.nan
