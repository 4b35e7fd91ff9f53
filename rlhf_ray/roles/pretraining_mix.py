"""Pretraining text in the policy's update (PPO-ptx; Ouyang et al. 2022, eq. 2): its rows, their order, their loss.

The loss is the mean over all predicted tokens of an optimizer step's rows on all ranks, at temperature 1, and its
gradient is added to the policy's. Every rank reads the text without a copy and selects the same rows.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_ray.checkpoint.state_files import load_state
from rlhf_ray.config.algorithm import PtxConfig
from rlhf_ray.data.contents import Contents
from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.data.supervised_records import Sequences
from rlhf_ray.errors import CheckpointError
from rlhf_ray.roles.learner import Learner
from rlhf_ray.roles.micro_batch import AverageMeter, MicroBatch
from rlhf_ray.roles.supervised_learner import predictable


class PretrainingMix:
    """The pretraining text of one rank of the policy."""

    def __init__(self, config: PtxConfig, text: Sequences, seed: int, sizes: Sequence[int] | None = None,
                 contents: Contents | None = None) -> None:
        """
        Args:
            sizes: rows of each data set of a mix, in order; None for one data set.
            contents: digest of each data set.
        """
        self.config = config
        self._text = text
        self._cursor = PromptCursor(sizes or [len(text)], seed, True, config.weights, contents)

    def backward(self, learner: Learner, meter: AverageMeter) -> None:
        """Add the gradient of the next rows' loss to that of the learner's next optimizer step.

        With a coefficient of 0 the loss is only measured. Adds `ptx_loss`, in nats per token, to the meter.
        """
        rows = self.next_rows()
        trains = self.config.coef > 0
        with torch.set_grad_enabled(trains):
            for share in self.shares(learner, rows, meter):
                if trains:
                    learner.engine.backward(self.config.coef * share)

    def next_rows(self) -> Sequences:
        """The rows of the next optimizer step."""
        return self._text.select([row for _, row in self._cursor.next(self.config.batch_size)])

    def shares(self, learner: Learner, rows: Sequences, meter: AverageMeter) -> Iterator[Tensor]:
        """This rank's parts of the mean loss of the rows; the sum over all ranks and micro-batches is the loss."""
        engine = learner.engine
        whole = float(predictable(rows).sum())
        for part, counted in learner.parts(rows):
            micro = MicroBatch(part, engine.device)
            predicted = torch.as_tensor(np.flatnonzero(predictable(part)), device=engine.device)
            run = engine.forward if torch.is_grad_enabled() else engine.infer
            loss = -run(micro.tokens, micro.packing, predicted, temperature=1.0)[0].mean()
            weight = float(len(predicted)) if counted else 0.0
            meter.add(weight, {"ptx_loss": loss.detach()})
            yield loss * (weight / whole)

    def state_dict(self) -> dict[str, Any]:
        """State of the cursor."""
        return self._cursor.state_dict()

    def load(self, path: Path) -> None:
        """Restore the cursor.

        Raises:
            CheckpointError: nothing was saved, or it belongs to another text or seed.
        """
        if not path.is_file():
            raise CheckpointError(f"the checkpoint has no position in the pretraining text ({path.name}): it was saved "
                                  "without ptx. Remove the section to resume, or start a new run.")
        self._cursor.load_state_dict(load_state(path))
