"""Whether the generators sampled with the weights whose version they name.

The log-probability that a generator gave a token is compared with that of transformers' own forward pass, under the
weights that the policy had after the update of that number (the learner's journal has them). A stale version, or one of
whose tensors some are stale, gives other log-probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chaos.witness.data_order import Tokens
from chaos.witness.history import History, Update
from chaos.witness.weights import Tensors, load_weights

TOLERANCE = 1e-3
"""Nats. In float32 the two computations differ by less than 1e-5; the tiny models' learning rate is so high that one
update changes some token of a batch by more than 1."""


class Versions:
    """Log-probabilities under the weights that were kept."""

    def __init__(self, model: Path, directory: Path, temperature: float) -> None:
        """
        Args:
            model: in Hugging Face format; its architecture is used.
            directory: where the weights were kept.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        self._directory, self._temperature = directory, temperature
        self._loaded: str | None = None
        """Digest of the weights in the model."""
        self._model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32)
        self._model.eval()

    def logprobs(self, digest: str, samples: Sequence[Tokens]) -> list[Tensor] | None:
        """The log-probabilities of each sample's tokens from its second on; None if the weights were not kept."""
        if not self._load(digest):
            return None
        longest = max(map(len, samples))
        padded = torch.tensor([[*sample, *[0] * (longest - len(sample))] for sample in samples])
        with torch.no_grad():
            logits = self._model(padded).logits / self._temperature
        chosen = logits[:, :-1].log_softmax(-1).gather(-1, padded[:, 1:, None])[..., 0]
        return [row[: len(sample) - 1] for row, sample in zip(chosen, samples, strict=True)]

    def _load(self, digest: str) -> bool:
        if digest != self._loaded:
            tensors = load_weights(self._directory, digest)
            if tensors is None:
                return False
            _copy_into(self._model, tensors)
            self._loaded = digest
        return True


def _copy_into(model: Any, tensors: Tensors) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(tensors[name]))


def version_problems(policy: History, rollouts: Sequence[dict[str, Any]], versions: Versions,
                     max_staleness: int) -> Iterator[str]:
    """Sentences about the updates that trained on samples of another version than their generator named, of an older
    one than allowed, or of no generator.

    Args:
        rollouts: the lines of the policy's journal about samples from generators.
    """
    named = {_identity(sample): (line["time"], sample["versions"])
             for line in rollouts for sample in line["samples"]}
    for update in policy.in_order():
        labels = [named.get(_identity(sample), (None, None))[1] for sample in update.batch]
        missing = sum(label is None for label in labels)
        if missing or not labels:
            yield f"update {update.number}: {missing or 'all'} of its samples came from no generator"
            continue
        oldest = min((min(label) for label in labels if label), default=update.number - 1)
        if update.number - 1 - oldest > max_staleness:
            yield (f"update {update.number} trained on tokens of version {oldest}, and at most {max_staleness} "
                   "versions are allowed")
        gap = _largest_gap(policy, update, labels, versions)
        if gap is None:
            yield f"update {update.number}: the weights of the versions that its samples name do not exist"
        elif gap > TOLERANCE:
            yield (f"update {update.number}: log-probabilities of its samples differ by up to {gap:.4f} from those "
                   "under the weights of the version that their generator named")


def _identity(sample: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(sample["tokens"]), tuple(sample["logprobs"])


def _largest_gap(policy: History, update: Update, labels: Sequence[Sequence[int]], versions: Versions) -> float | None:
    """The largest difference of a token's log-probability from that under its version's weights; None if weights are
    missing."""
    samples = [tuple(sample["tokens"]) for sample in update.batch]
    largest = 0.0
    for version in sorted({version for label in labels for version in label}):
        recomputed = versions.logprobs(policy.weights_after(version), samples)
        if recomputed is None:
            return None
        for sample, label, row in zip(update.batch, labels, recomputed, strict=True):
            mine = torch.tensor(label) == version
            given = torch.tensor(sample["logprobs"])
            tokens = len(sample["tokens"])
            places = torch.tensor(sample.get("places", range(tokens - len(label), tokens)), dtype=torch.long)
            gaps = (row[places - 1] - given).abs()[mine]
            largest = max([largest, *gaps.tolist()])
    return largest
