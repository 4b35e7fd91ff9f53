"""One PPO update: the batch from leased experience, its mini-batches, and the optimizer steps on them.

Every rank reads the whole batch (columns come from the object store without a copy) and computes the same plan, so
ranks agree on whitening and on the number of backward passes without communication.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlhf_ray.algorithms.masking import denominator, masked_whiten
from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.data.batching import RowNumbers
from rlhf_ray.engine.deepspeed_engine import StepResult
from rlhf_ray.errors import TrainingError
from rlhf_ray.records import Batch, Experience, UpdateStats
from rlhf_ray.rewards.protocol import finished
from rlhf_ray.roles.learner import Learner
from rlhf_ray.roles.micro_batch import AverageMeter, MicroBatch


def training_batch(experiences: Sequence[Experience], whiten: bool, overlong_filter: bool = False) -> Batch:
    """All experience of one update in order; with `whiten`, advantages are whitened over the response tokens of the
    rows that count, with `overlong_filter` over those that it leaves in (as in NeMo-RL's PPO)."""
    whole = Experience.concat(experiences)
    columns = {f.name: getattr(whole, f.name) for f in fields(Batch)}
    if whiten:
        mask = whole.response_mask & np.repeat(counted_rows(whole), whole.lengths)
        if overlong_filter:
            mask = mask & np.repeat(~truncated_rows(whole), whole.lengths)
        columns["advantages"] = masked_whiten(torch.from_numpy(whole.advantages), torch.from_numpy(mask)).numpy()
    return Batch(**columns)


def counted_rows(rows: Batch) -> NDArray[np.bool_]:
    """[N] whether the row is in the loss: all but those of episodes that are masked."""
    return np.ones(len(rows), dtype=bool) if rows.counted is None else rows.counted


def counted_tokens(rows: Batch) -> NDArray[np.bool_]:
    """[T] the response tokens of the rows that count."""
    return rows.response_mask & np.repeat(counted_rows(rows), rows.lengths)


def truncated_rows(rows: Batch) -> NDArray[np.bool_]:
    """[N] whether the row belongs to a sample that did not end by itself, with a stop token or a stop string."""
    return ~finished(rows)[rows.samples]


@dataclass(frozen=True)
class ChosenRows:
    """What a mini-batch's rows are for: numbers of rows in it, ascending."""

    passed: RowNumbers
    """Those that are computed."""
    counted: RowNumbers
    """Those that the loss is a mean over, `passed` among them. The loss of those that are not passed is 0."""


def mini_batches(samples: int, epochs: int, per_epoch: int, seed: int, step: int) -> Iterator[np.ndarray]:
    """Sample numbers of each mini-batch: every epoch visits all samples once, in an order of its own."""
    for epoch in range(epochs):
        order = np.random.default_rng([seed, step, epoch]).permutation(samples)
        yield from np.split(order, per_epoch)


@dataclass
class Update:
    """The update under way, as its optimizer steps see it."""

    kl_coef: float = 0.0
    """Coefficient of a KL penalty in the loss."""
    applied: int = 0
    """Optimizer steps applied so far; with 0 the weights are still those from before the update."""


class PPOLearner(Learner):
    """One rank of a model that is updated on experience: the policy or the critic."""

    algorithm: AlgorithmConfig

    @staticmethod
    def common_arguments(config: PPOConfig, learner: LearnerConfig, rank: int, steps: int) -> dict[str, Any]:
        """Arguments that policy and critic have in common, for a rank in a run.

        Args:
            learner: the section of the model.
            steps: updates of the model in the whole run.
        """
        return {
            "config": learner,
            "rank": rank,
            "world": learner.workers,
            "seed": config.run.seed,
            "total_steps": steps * config.algorithm.epochs * config.algorithm.mini_batches,
            "algorithm": config.algorithm,
        }

    def count(self, rows: Batch) -> float:
        """Number of response tokens or samples, depending on the loss's aggregation; rows are parts of a sample."""
        micro = MicroBatch(rows, "cpu")
        return float(denominator(micro.mask, self.algorithm.aggregate, micro.row_weights))

    def chosen_rows(self, mini_batch: Batch) -> ChosenRows:
        """All rows, less those of masked episodes, and of truncated samples with `algorithm.overlong_filter`.

        The filter is a mask of 0: truncated samples are neither in the sum nor in the denominator of any term, token or
        sequence (NeMo-RL 0.7; TRL 1.16 and SkyRL 0.4 alike where losses are means over tokens). Both peers with a
        critic, NeMo-RL and SkyRL, leave them out of its loss too. Their scores were compared with the others' before.
        """
        counted = counted_rows(mini_batch)
        if self.algorithm.overlong_filter:
            counted = counted & ~truncated_rows(mini_batch)
        rows = np.flatnonzero(counted)
        return ChosenRows(rows, rows)

    def optimize(
        self, mini_batch: Batch, chosen: ChosenRows, update: Update, meter: AverageMeter
    ) -> StepResult | None:
        """One optimizer step of an update, by the losses of a mini-batch; None if the update ends before it.

        Where no row is chosen, the gradient is 0, and a step is made all the same: weight decay and momentum act, and
        all mini-batches make as many steps.
        """
        raise NotImplementedError


def run_update(learner: PPOLearner, batch: Batch, step: int, kl_coef: float = 0.0) -> UpdateStats:
    """Several epochs of mini-batch steps on one batch (Schulman et al. 2017, algorithm 1).

    Steps that are not applied, see `TrainEngine.step`, are counted and excluded from the metrics. After one that ends
    the update (`algorithm.target_kl`) none is made, and the schedule of the learning rate goes on as if all were. A
    repeated call for the last update returns its statistics without training again.

    Raises:
        TrainingError: as `TrainEngine.count_update`, or `step` does not follow the last update.
    """
    if (last := learner.last_update) is not None:
        if step == last.step:
            return last
        if step != last.step + 1:
            raise TrainingError(f"update {step} was requested after update {last.step}: updates must be consecutive. "
                                "Continue with --resume from the last checkpoint")
    began = time.perf_counter()
    epochs = learner.algorithm.epochs
    per_epoch = learner.algorithm.mini_batches
    update = Update(kl_coef)
    meter = AverageMeter()  # of the steps that were applied
    norms: list[float] = []
    skipped = 0
    rate = 0.0
    tokens = 0

    # One optimizer step for each mini-batch.
    for samples in mini_batches(batch.sample_count, epochs, per_epoch, learner.seed, step):
        rows = batch.select(batch.rows_of(samples))
        chosen = learner.chosen_rows(rows)
        tokens += int(rows.lengths[chosen.passed].sum())
        of_step = AverageMeter()
        result = learner.optimize(rows, chosen, update, of_step)
        if result is None:
            learner.engine.pass_over(epochs * per_epoch - update.applied - skipped)
            break
        rate = result.learning_rate
        if not result.applied:
            skipped += 1
            continue
        update.applied += 1
        norms.append(result.grad_norm)
        meter.merge(of_step)

    # What the update did.
    learner.engine.count_update(update.applied)
    metrics = {**meter.means(), "grad_norm": float(np.mean(norms)) if norms else math.nan, "learning_rate": rate}
    learner.last_update = UpdateStats(
        step=step, applied=update.applied, skipped=skipped, seconds=time.perf_counter() - began, tokens=tokens,
        metrics=metrics)
    return learner.last_update
