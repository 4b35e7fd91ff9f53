"""The learner of process reward models: a language model that predicts a step's label at the placeholder after it."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_ray.algorithms.losses import process_reward_loss
from rlhf_ray.algorithms.losses.supervised import IGNORE
from rlhf_ray.checkpoint.model_card import ModelCardInfo
from rlhf_ray.config.steps import StepsConfig
from rlhf_ray.data.process_rows import StepRows
from rlhf_ray.data.step_format import StepTokens, save_steps
from rlhf_ray.models.loading import load_causal_lm, load_tokenizer
from rlhf_ray.models.packed_model import PackedStepModel, good_probabilities
from rlhf_ray.models.packing import Packing
from rlhf_ray.observability.owner import Term
from rlhf_ray.roles.learner import Gather
from rlhf_ray.roles.supervised_learner import SupervisedLearner


class ProcessRewardLearner(SupervisedLearner):
    """Cross-entropy of step labels among the good and the bad token, the mean over labelled steps."""

    def __init__(self, steps: StepsConfig, **common: Any) -> None:
        """`common` is what every supervised learner takes."""
        super().__init__(**common)
        self.steps = steps

    def build(self) -> PackedStepModel:
        """The language model, and the ids of the tokens it is asked at and answers with."""
        self._ids = StepTokens.of(self.steps, load_tokenizer(self.model_config))
        return PackedStepModel(load_causal_lm(self.model_config, self.mapped))

    def loss(self, part: StepRows) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss per labelled step, in nats; the share of steps on whose better half the model is, and the mean
        probability that it gives to a step's being right."""
        device, places = self.engine.device, np.flatnonzero(labelled(part))
        tokens = torch.as_tensor(part.tokens.astype(np.int64), device=device)
        labels = torch.as_tensor(part.labels[places], device=device)
        run = self.engine.forward if torch.is_grad_enabled() else self.engine.infer
        logits = run(tokens, Packing.of(part.lengths, device), torch.as_tensor(places, device=device))
        loss = process_reward_loss(logits, labels, torch.ones_like(labels, dtype=torch.bool),
                                   [self._ids.good, self._ids.bad])
        good = good_probabilities(logits.detach(), self._ids.good, self._ids.bad)
        right = labels >= 0.5 if labels.is_floating_point() else labels == self._ids.good
        return loss, {"accuracy": ((good >= 0.5) == right).float().mean(), "probability": good.mean()}

    def count(self, part: StepRows) -> float:
        """Labelled steps."""
        return float(labelled(part).sum())

    def export(
        self, directory: str, card: ModelCardInfo, term: Term | None = None, gather: Gather | None = None
    ) -> None:
        """The model in Hugging Face format, and how it is to be asked (process_reward.json); else as in `Learner`."""
        super().export(directory, card, term, gather)
        if self.rank == 0:
            if term is not None:
                term.check()
            save_steps(self.steps, Path(directory))


def labelled(part: StepRows) -> np.ndarray:
    """[T] bool: placeholders of steps that have a label."""
    return part.placeholders & (part.labels != IGNORE)
