"""Learners that write a journal of what they train on. Otherwise they equal the real ones, bit for bit.

The rows come from the tensors that the module's forward pass receives. A journal has these events:

    start: the module is built (digest of its weights).
    load: a checkpoint was loaded (step in its manifest, digest of the weights).
    fed: an optimizer step (update, index within the update, whether it was applied, the tokens of each row fed
        forward; on the first rank `masked`, the rows of masked episodes, which are in no loss). The first of an update
        on the first rank of the policy also has the update's samples: `batch` (tokens, and log-probabilities of what
        was sampled; `places` of these tokens where they are not the last ones).
    update: an update is over (digests of the weights before and after it).
    rollouts, on the first rank of the policy: samples from a generator (tokens, log-probabilities and weight versions
        of what was sampled).

That rank also writes its weights after each update to a file, named by their digest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from chaos.witness.journals import JOURNALS, WEIGHTS, Journal
from chaos.witness.weights import digest_of, keep
from rlhf_ray.data.batching import RowNumbers
from rlhf_ray.records import Batch, Experience, Rollout, TokenScores
from rlhf_ray.roles.critic_learner import CriticLearner
from rlhf_ray.roles.micro_batch import AverageMeter, PartLoss
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.roles.ppo_update import ChosenRows, PPOLearner, Update


class Witnessed(PPOLearner):
    """Mixin of a learner that writes a journal. Its weights must be whole on every rank (ZeRO stage 2 at most)."""

    role = ""
    _journal: Journal
    _rows: list[list[int]]
    """Tokens of each row that the optimizer step under way has fed forward so far."""
    _counted = False
    """Whether the micro-batch under way counts; a row that only takes part in collective calls does not."""
    _counts = False
    """Whether the rows of a forward pass count now."""
    _update = 0
    """Number of the update under way, from 1."""
    _index = 0
    """Number of its next optimizer step, from 0."""
    _batch: list[dict[str, Any]] | None = None
    """Its samples, where they are noted."""

    def start(self, address: str, timeout_s: float) -> dict[str, float]:
        """As the real learner; opens the journal."""
        report = super().start(address, timeout_s)
        self._journal, self._rows = Journal(journals(), f"{self.role}_{self.rank}"), []
        self.engine.module.register_forward_pre_hook(self._note_rows)
        self._journal.add("start", weights=self._digest())
        return report

    def load(self, directory: str) -> None:
        """As the real learner; notes which checkpoint it was."""
        super().load(directory)
        manifest = json.loads((Path(directory).parent / "manifest.json").read_text())["manifest"]
        self._journal.add("load", step=manifest["step"], weights=self._digest())

    def update(self, step: int, *rest: Any) -> Any:
        """As the real learner; notes the weights before and after it."""
        self._update = step + 1
        self._index = 0
        self._batch = self._samples(rest)
        before = self._digest()
        stats = super().update(step, *rest)  # type: ignore[misc]
        if self._index:  # a call that is repeated trains nothing
            self._journal.add("update", update=self._update, before=before, weights=self._digest())
        return stats

    def parts(self, rows: Any, passed: RowNumbers | None = None) -> Iterator[tuple[Any, bool]]:
        """As the real learner; remembers whether a micro-batch counts."""
        for part, counted in super().parts(rows, passed):
            self._counted = counted
            yield part, counted

    def loss(self, part: Any, *rest: Any) -> PartLoss:
        """As the real learner; the rows of its forward pass count if the micro-batch does."""
        self._counts = self._counted
        try:
            return super().loss(part, *rest)  # type: ignore[misc, no-any-return]
        finally:
            self._counts = False

    def optimize(self, mini_batch: Batch, chosen: ChosenRows, update: Update, meter: AverageMeter) -> Any:
        """As the real learner; notes the rows that it fed forward, and as fed those that it may leave out: rows whose
        advantages are all 0, and truncated ones with the overlong filter. Those of masked episodes are noted apart."""
        self._rows = []
        masked = []
        result = super().optimize(mini_batch, chosen, update, meter)
        if not self.rank:
            for row in np.setdiff1d(np.arange(len(mini_batch)), chosen.passed).tolist():
                truncated = self.algorithm.overlong_filter and row not in chosen.counted
                if mini_batch.counted is not None and not mini_batch.counted[row]:
                    masked.append(mini_batch.row(row, "tokens").tolist())
                elif truncated or not mini_batch.row(row, "advantages").any():
                    self._rows.append(mini_batch.row(row, "tokens").tolist())
        applied = result is not None and result.applied
        more = {"masked": masked, "batch": [] if self._index else self._batch}
        self._journal.add("fed", update=self._update, index=self._index, applied=applied, rows=self._rows,
                          **{name: value for name, value in more.items() if value})
        self._index += 1
        return result

    def _note_rows(self, _: Any, inputs: tuple[Any, ...]) -> None:
        if self._counts:
            tokens, packing, *_ = inputs
            self._rows += [row.tolist() for row in torch.split(tokens, packing.lengths.tolist())]

    def _samples(self, experiences: Sequence[Any]) -> list[dict[str, Any]] | None:
        """The samples of an update, where they are noted."""
        return None

    def _digest(self) -> str:
        """Digest of the weights."""
        return digest_of(self._tensors())

    def _tensors(self) -> dict[str, NDArray[np.float32]]:
        return {name: parameter.detach().float().cpu().numpy()
                for name, parameter in self.engine.module.model.named_parameters()}


class WitnessedPolicyLearner(Witnessed, PolicyLearner):
    """One rank of the policy."""

    role = "policy_learner"

    def logprobs(self, *rollouts: Rollout) -> TokenScores:
        """As the real learner; notes the samples."""
        if not self.rank:
            self._journal.add("rollouts", samples=[
                {"tokens": rollout.row(i, "tokens").tolist(),
                 "logprobs": rollout.row(i, "logprobs")[rollout.row(i, "response_mask")].tolist(),
                 "versions": rollout.row(i, "versions")[rollout.row(i, "response_mask")].tolist()}
                for rollout in rollouts for i in range(len(rollout))])
        return super().logprobs(*rollouts)

    def _samples(self, experiences: Sequence[Any]) -> list[dict[str, Any]] | None:
        if self.rank:
            return None
        return [{"tokens": part.row(i, "tokens").tolist(),
                 "logprobs": part.row(i, "behaviour_logprobs")[part.row(i, "response_mask")].tolist(),
                 **places(part.row(i, "response_mask"))}
                for part in experiences if isinstance(part, Experience) for i in range(len(part))]

    def _digest(self) -> str:
        if not self.rank:
            keep(self._tensors(), journals() / WEIGHTS)
        return super()._digest()


class WitnessedCriticLearner(Witnessed, CriticLearner):
    """One rank of the critic."""

    role = "critic_learner"


def places(sampled: NDArray[np.bool_]) -> dict[str, list[int]]:
    """Where sampled tokens are, unless they are the last ones."""
    found = np.flatnonzero(sampled)
    at_the_end = len(found) and int(found[0]) == len(sampled) - len(found)
    return {} if at_the_end else {"places": found.tolist()}


def journals() -> Path:
    """The directory of this run's journals."""
    return Path(os.environ[JOURNALS])

