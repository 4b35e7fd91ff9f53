"""The learners of the supervised stages: SFT on demonstrations, reward models on preferences, process reward models."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_ray.algorithms.losses import pairwise_loss, process_reward_loss
from rlhf_ray.algorithms.losses.supervised import IGNORE
from rlhf_ray.checkpoint.model_card import ModelCardInfo
from rlhf_ray.config.data import StepsConfig
from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.data.stepwise_format import StepTokens, save_steps
from rlhf_ray.data.stepwise_supervision import StepRows
from rlhf_ray.data.supervised_records import Pairs, Sequences
from rlhf_ray.models.loading import has_scalar_head, load_causal_lm, load_scalar_model, load_tokenizer
from rlhf_ray.models.packed_model import (
    PackedLanguageModel,
    PackedScalarModel,
    PackedStepModel,
    last_token_scores,
    step_values,
)
from rlhf_ray.models.packing import Packing
from rlhf_ray.observability.owner_record import Term
from rlhf_ray.records import UpdateStats
from rlhf_ray.roles.learner import Learner
from rlhf_ray.roles.micro_batch import AverageMeter, MicroBatch, PartLoss


class SupervisedLearner(Learner):
    """One rank of a supervised stage. It holds the data set and selects the same batches as every other rank."""

    def __init__(self, config: LearnerConfig, model: ModelConfig | NewModelConfig, rank: int, world: int, seed: int,
                 total_steps: int, batch_size: int, longest: int | None = None) -> None:
        super().__init__(config, model, rank, world, seed, total_steps, longest)
        self.batch_size = batch_size

    def take(
        self, train: Any, held_out: Any, sizes: list[int] | None = None, weights: Sequence[float] = (1.0,)
    ) -> None:
        """Keep the training rows and the held-out rows for the whole run.

        Args:
            sizes: number of training rows of each data set of a mix, in order; None for one data set.
            weights: weight of each data set.
        """
        self._train = train
        self._held_out = held_out
        self._sizes = sizes or [len(train)]
        self._weights = weights
        self._begin()

    def update(self, step: int) -> UpdateStats:
        """Update number `step` (from 1), on that step's batch.

        Raises:
            TrainingError: as `TrainEngine.count_update`.
        """
        began = time.perf_counter()
        batch = self._train.select(self._rows_of(step))
        meter = AverageMeter()
        for share in self.shares(batch, self.loss, meter):
            self.engine.backward(share)
        result = self.engine.step()
        self.engine.count_update(result.applied)
        metrics = {**meter.means(), "grad_norm": result.grad_norm, "learning_rate": result.learning_rate}
        return UpdateStats(step=step, applied=int(result.applied), skipped=int(not result.applied),
                           seconds=time.perf_counter() - began, tokens=int(batch.lengths.sum()), metrics=metrics)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Mean loss and statistics over the held-out rows of all ranks; empty if there are none."""
        if not len(self._held_out):
            return {}
        meter = AverageMeter()
        for part, counted in self.parts(self._held_out):
            meter.add(self.count(part) if counted else 0.0, self.loss(part).means)
        return meter.means()

    def loss(self, part: Any) -> PartLoss:
        """The loss of some rows, without gradients in an evaluation."""
        raise NotImplementedError

    def run(self, rows: Sequences | StepRows, *args: Tensor) -> Any:
        """The module's forward pass on some rows; without gradients in an evaluation."""
        micro = MicroBatch(rows, self.engine.device)
        forward = self.engine.forward if torch.is_grad_enabled() else self.engine.infer
        return forward(micro.tokens, micro.packing, *args)

    def _begin(self) -> None:
        self._cursor = PromptCursor(self._sizes, self.seed, shuffle=True, weights=self._weights)
        self._reached = 0

    def _rows_of(self, step: int) -> np.ndarray:
        """Rows of an update; a resumed learner skips the rows of earlier updates."""
        if step <= self._reached:
            self._begin()
        pairs = self._cursor.next((step - self._reached) * self.batch_size)[-self.batch_size :]
        self._reached = step
        return np.array([row for _, row in pairs])


class SFTLearner(SupervisedLearner):
    """Next-token prediction on packed demonstrations; the loss is the mean over all tokens that carry loss."""

    def build(self) -> PackedLanguageModel:
        """The language model at temperature 1."""
        return PackedLanguageModel(load_causal_lm(self.model_config, self.mapped), chunks=self.chunks)

    def loss(self, part: Sequences) -> PartLoss:
        """Mean negative log-probability per predicted token, in nats."""
        predicted = torch.as_tensor(np.flatnonzero(predictable(part)), device=self.engine.device)
        logprobs, _ = self.run(part, predicted)
        loss = -logprobs.sum() / max(1, len(predicted))  # rows without loss tokens contribute nothing
        return PartLoss(loss, {"loss": loss.detach()})

    def count(self, rows: Sequences) -> float:
        """Predicted tokens."""
        return float(predictable(rows).sum())


class RewardModelLearner(SupervisedLearner):
    """Bradley-Terry loss on preference pairs; both sides of a pair go through the model in one packed pass."""

    model_config: ModelConfig

    def __init__(self, config: LearnerConfig, model: ModelConfig, rank: int, world: int, seed: int, total_steps: int,
                 batch_size: int, longest: int | None = None, head_dropout: float = 0.0,
                 new_head: bool = False) -> None:
        """
        Args:
            head_dropout: that of `PackedScalarModel`.
            new_head: do not use the head of a reward model to start from.
        """
        super().__init__(config, model, rank, world, seed, total_steps, batch_size, longest)
        self.head_dropout = head_dropout
        self.new_head = new_head

    def build(self) -> PackedScalarModel:
        """A reward model with its own head, or the backbone of another model with a new one."""
        new_head = self.new_head or not has_scalar_head(self.model_config)
        model = load_scalar_model(self.model_config, new_head=new_head, mapped=self.mapped)
        return PackedScalarModel(model, self.head_dropout)

    def loss(self, part: Pairs) -> PartLoss:
        """Mean pairwise loss, beyond the pairs' margins if they have any; statistics: accuracy, mean score and mean
        margin (chosen minus rejected)."""
        both = Sequences.concat([part.chosen, part.rejected])
        scores = last_token_scores(self.run(both), Packing.of(both.lengths, self.engine.device))
        chosen, rejected = scores.chunk(2)
        margin = (chosen - rejected).detach()
        margins = None if part.margins is None else torch.as_tensor(part.margins, device=margin.device)
        loss = pairwise_loss(chosen, rejected, margins)
        return PartLoss(loss, {"loss": loss.detach(), "accuracy": (margin > 0).float().mean(),
                               "margin": margin.mean(), "score": scores.detach().mean()})

    def count(self, rows: Pairs) -> float:
        """Pairs."""
        return float(len(rows))


class ProcessRewardLearner(SupervisedLearner):
    """Cross-entropy of step labels among the label tokens, the mean over labelled steps."""

    def __init__(self, steps: StepsConfig, **common: Any) -> None:
        """`common`: arguments of `SupervisedLearner`."""
        super().__init__(**common)
        self.steps = steps

    def build(self) -> PackedStepModel:
        """The language model; also resolves the ids of the placeholder and label tokens."""
        self._ids = StepTokens.of(self.steps, load_tokenizer(self.model_config))
        return PackedStepModel(load_causal_lm(self.model_config, self.mapped))

    def loss(self, part: StepRows) -> PartLoss:
        """Mean loss per labelled step, in nats; statistics: accuracy over steps (of the most probable label), and the
        mean probability of a correct step (`step_values`)."""
        device = self.engine.device
        places = np.flatnonzero(labelled(part))

        # The loss of the labels' tokens.
        labels = torch.as_tensor(part.labels[places], device=device)
        logits = self.run(part, torch.as_tensor(places, device=device))
        loss = process_reward_loss(logits, labels, torch.ones_like(labels, dtype=torch.bool),
                                   self._ids.labels)

        # Statistics: whether the label is the most probable one, and how probable a correct step is.
        good = step_values(logits.detach(), self._ids.labels, self._ids.values)
        if self._ids.others:
            likeliest = torch.tensor(self._ids.labels, device=device)[logits.detach()[:, self._ids.labels].argmax(-1)]
            right = likeliest == labels
        else:
            is_good = labels >= 0.5 if labels.is_floating_point() else labels == self._ids.good
            right = (good >= 0.5) == is_good
        return PartLoss(loss, {"loss": loss.detach(), "accuracy": right.float().mean(), "probability": good.mean()})

    def count(self, rows: StepRows) -> float:
        """Labelled steps."""
        return float(labelled(rows).sum())

    def export(self, directory: str, card: ModelCardInfo, term: Term | None = None) -> None:
        """As `Learner.export`, plus process_reward.json with the step format."""
        super().export(directory, card, term)
        if self.rank == 0:
            if term is not None:
                term.check()
            save_steps(self.steps, Path(directory))


def labelled(part: StepRows) -> np.ndarray:
    """[T] bool: placeholders of steps that have a label."""
    return part.placeholders & (part.labels != IGNORE)


def predictable(part: Sequences) -> np.ndarray:
    """[T] bool: tokens that carry loss and are not the first of their row."""
    mask = part.loss_mask.copy()
    mask[part.offsets[:-1][part.lengths > 0]] = False
    return mask
