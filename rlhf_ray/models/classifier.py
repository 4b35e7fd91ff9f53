"""Sequence classifiers of any architecture as scorers.

Decoders score a row at its last token, whatever that token is, by the same passes as learners. Encoders use their own
head, on rows padded to the longest of a micro-batch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.models.config_json import context_of
from rlhf_ray.models.loading import check_scalar_head, label_names, load_scalar_model
from rlhf_ray.models.packed_model import PackedScalarModel, last_token_scores
from rlhf_ray.models.packing import Packing
from rlhf_ray.models.parity import ParityProbe, RowLimits
from rlhf_ray.models.shard import Place, place_whole


@dataclass(frozen=True)
class EncodedRow:
    """A text as a classifier reads it."""

    ids: NDArray[np.int32]
    """[T] token ids."""
    types: NDArray[np.int32] | None = None
    """[T] which text of a pair each token belongs to, for models with token types."""


class Classifier:
    """A frozen classifier on this process's device, of which one label is the score."""

    def __init__(self, config: ModelConfig, label: int | str | None = None, probability: bool = False,
                 place: Place = place_whole) -> None:
        """
        Args:
            label: name or number of one of several labels.
            probability: score by the label's probability rather than its logit.
            place: puts the module where its passes run.

        Raises:
            ModelError: the model cannot be loaded, or is not a classifier with this label.
        """
        self._label, self._probability = check_scalar_head(config, label=label), probability
        labels = len(label_names(config))
        self._model = load_scalar_model(config, new_head=False, labels=labels)
        self._packed = PackedScalarModel(self._model)
        self._device = place(self._packed)
        self.is_encoder = not hasattr(self._model, "score")
        """Whether the model is an encoder, which has tokens of its own at the ends of a text."""
        self.reads_pairs = self.is_encoder and labels == 1
        """Whether the model is an encoder with one label, which reads prompt and response as a pair of texts."""
        self.reads_texts = self.is_encoder and labels > 1
        """Whether it is an encoder with several labels, which reads prompt and response as one text."""
        self.longest = _context(self._model)
        """Maximum number of tokens of a row; None if the model does not set one."""
        self.vocabulary = int(self._model.config.get_text_config().vocab_size)
        """Number of token ids."""

    def compare(
        self, worker: str, longest: int, budget: int, largest: Callable[[list[float]], list[float]] | None = None
    ) -> dict[str, float]:
        """Compare a decoder's passes with transformers' own; see `ParityProbe.check`.

        Args:
            longest: maximum tokens of a row.
            budget: maximum tokens of a forward pass.
            largest: as for `ParityProbe`.
        """
        if self.is_encoder:
            return {}
        limits = RowLimits.of(self._model.config, longest, budget)
        return ParityProbe(self._packed, limits, self._device, largest=largest).check(worker)

    def digest(self) -> str:
        """Hex digest of the configuration and of every weight in the loaded precision."""
        shape = {k: v for k, v in self._model.config.to_diff_dict().items() if not k.startswith("_")}
        digest = hashlib.sha256(json.dumps(shape, sort_keys=True, default=str).encode())
        for name, tensor in sorted(self._model.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    @torch.no_grad()
    def scores(self, rows: Sequence[EncodedRow], plan: Sequence[NDArray[np.int64]]) -> NDArray[np.float32]:
        """[N] float32 scores; `plan` lists micro-batches of row numbers."""
        scores = np.zeros(len(rows), dtype=np.float32)
        for numbers in plan:
            part = [rows[i] for i in numbers]
            logits = self._encoder_logits(part) if self.is_encoder else self._decoder_logits(part)
            scores[numbers] = self._chosen(logits.reshape(len(part), -1)).cpu().numpy()
        return scores

    def _chosen(self, logits: Tensor) -> Tensor:
        """[N] scores of the label, from the logits of all labels `[N, labels]`."""
        if not self._probability:
            return logits[:, self._label]
        exclusive = logits.shape[1] > 1 and self._model.config.problem_type != "multi_label_classification"
        return (logits.softmax(-1) if exclusive else logits.sigmoid())[:, self._label]

    def _decoder_logits(self, rows: Sequence[EncodedRow]) -> Tensor:
        tokens = torch.as_tensor(np.concatenate([row.ids for row in rows]).astype(np.int64), device=self._device)
        packing = Packing.of(np.array([len(row.ids) for row in rows]), self._device)
        return last_token_scores(self._packed(tokens, packing), packing)

    def _encoder_logits(self, rows: Sequence[EncodedRow]) -> Tensor:
        packing = Packing.of(np.array([len(row.ids) for row in rows]), self._device)
        inputs = {"input_ids": self._grid(packing, [row.ids for row in rows], self._model.config.pad_token_id or 0)}
        inputs["attention_mask"] = self._grid(packing, [np.ones_like(row.ids) for row in rows], 0)
        if any(row.types is not None for row in rows):  # rows of token ids without types are one text
            types = [np.zeros_like(row.ids) if row.types is None else row.types for row in rows]
            inputs["token_type_ids"] = self._grid(packing, types, 0)
        return self._model(**inputs).logits.float()

    def _grid(self, packing: Packing, columns: Sequence[NDArray[np.int32]], fill: int) -> Tensor:
        flat = torch.as_tensor(np.concatenate(columns).astype(np.int64), device=self._device)
        return packing.to_grid(flat, fill)


def _context(model: Any) -> int | None:
    longest = context_of(model.config)
    if longest is None:
        return None
    table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    first = getattr(table, "padding_idx", None)  # RoBERTa's positions start after the padding's
    return longest if first is None else longest - first - 1
