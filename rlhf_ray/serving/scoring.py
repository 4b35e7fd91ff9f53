"""The model behind the service: texts to token rows, and rows to scores by one packed forward pass."""

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.encoding import encode, end_token
from rlhf_ray.data.tokenizer import check_vocabulary, tokenizer_digest
from rlhf_ray.models.loading import check_model_directory, load_scalar_model, load_tokenizer
from rlhf_ray.models.packed_model import PackedScalarModel, last_token_scores
from rlhf_ray.models.packing import Packing
from rlhf_ray.serving.schema import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TokenRow = NDArray[np.int64]
"""[T] token ids of a prompt and its response."""


class BadSampleError(ValueError):
    """A sample that this model cannot score; says which and why."""


class ServedModel:
    """A loaded reward model.

    Raises:
        ModelError: there is none, it has no one-label head, or its tokenizer does not fit.
    """

    def __init__(self, config: ModelConfig, max_batch_tokens: int) -> None:
        check_model_directory(config, "MODEL")
        self.path, self.dtype = config.path, config.dtype
        self._tokenizer, model = load_tokenizer(config), load_scalar_model(config, new_head=False)
        self._end, self._vocabulary = end_token(self._tokenizer), int(model.config.vocab_size)
        check_vocabulary(self._tokenizer, self._vocabulary, config.path)
        self.tokenizer_digest = tokenizer_digest(self._tokenizer)
        self.digest = model_digest(model, self.tokenizer_digest)
        context = getattr(model.config, "max_position_embeddings", None) or max_batch_tokens
        self.max_tokens = min(context, max_batch_tokens)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = PackedScalarModel(model).to(self._device).eval().requires_grad_(False)

    def rows(self, samples: Sequence[Sample]) -> list[TokenRow]:
        """Token ids of each sample.

        Raises:
            BadSampleError: a sample that is empty, too long, or has an id outside the vocabulary.
        """
        texts = [s for s in samples if s.tokens is None]
        encoded = iter(self._encode(texts))
        rows = [np.array(next(encoded) if s.tokens is None else s.tokens, dtype=np.int64) for s in samples]
        for i, row in enumerate(rows):
            if not 0 < len(row) <= self.max_tokens:
                raise BadSampleError(f"samples.{i} has {len(row)} tokens; the service takes 1 to {self.max_tokens}")
            if row.max() >= self._vocabulary:
                raise BadSampleError(f"samples.{i}.tokens has id {row.max()}, but the model's vocabulary ends at "
                                     f"{self._vocabulary - 1}; send texts, or ids of its own tokenizer")
        return rows

    def _encode(self, samples: Sequence[Sample]) -> list[list[int]]:
        """As training rows are made: the prompt with its leading tokens, the response, and an end if it has one."""
        prompts = encode(self._tokenizer, [s.prompt or "" for s in samples], leading=True)
        responses = encode(self._tokenizer, [s.response or "" for s in samples], leading=False)
        return [p + r + [self._end] * s.finished for p, r, s in zip(prompts, responses, samples, strict=True)]

    @torch.no_grad()
    def score(self, rows: Sequence[TokenRow]) -> NDArray[np.float32]:
        """[N] one score per row, finite or not, from one forward pass."""
        packing = Packing.of(np.array([len(row) for row in rows]), self._device)
        tokens = torch.as_tensor(np.concatenate(rows), device=self._device)
        return last_token_scores(self._model(tokens, packing), packing).cpu().numpy()


def model_digest(model: "PreTrainedModel", tokenizer: str) -> str:
    """Hex digest of what scores depend on: configuration, every weight as loaded (precision included), tokenizer."""
    shape = {k: v for k, v in model.config.to_diff_dict().items() if not k.startswith("_")}
    digest = hashlib.sha256(json.dumps([tokenizer, shape], sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data if tensor.dim() else
                      str(tensor.item()).encode())
    return digest.hexdigest()[:32]
