"""A process reward model as a source: every step of a response gets a score, on the token where it ends.

The policy's tokens and those of the process reward model need not be the same, so steps are found in the text: a step
is a range of characters, and a token is at the characters that it adds to the text decoded so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from rlhf_ray.config.rewards import Aggregate, ProcessReward
from rlhf_ray.data.batching import RowNumbers
from rlhf_ray.data.chat import ChatTemplate, PromptText, tools_of
from rlhf_ray.data.encoding import encode_prompts
from rlhf_ray.data.stepwise_format import StepTokens, load_steps
from rlhf_ray.engine.frozen_model import largest_of, place_of
from rlhf_ray.errors import SampleError
from rlhf_ray.models.config_json import context_of
from rlhf_ray.models.loading import load_causal_lm, load_tokenizer
from rlhf_ray.models.packed_model import PackedStepModel, step_values
from rlhf_ray.models.packing import Packing
from rlhf_ray.models.parity import ParityProbe, RowLimits
from rlhf_ray.records import response_start
from rlhf_ray.rewards.local_model import LocalSource
from rlhf_ray.rewards.protocol import RewardAnswer, RewardRequest, sample_names

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ProcessModelSource(LocalSource[ProcessReward]):
    """Scores each step by the probability that it is good, given by a model trained by `rlhf-ray process-reward`; with
    further labels, by the expected value of its label. A response without any step gets the probability 0, and is
    counted as a failure."""

    KIND = "process reward model"

    def _load(self) -> Mapping[str, float]:
        self._steps = load_steps(self._config, self._field)
        self._tokenizer, self._policy_tokenizer = load_tokenizer(self._config), load_tokenizer(self._policy)
        self._ids = StepTokens.of(self._steps, self._tokenizer)
        model = load_causal_lm(self._config)
        self._longest = context_of(model.config)
        self._model = PackedStepModel(model)
        self._device = place_of(self._shard)(self._model)
        limits = RowLimits.of(model.config, self._rows, self._budget)
        return ParityProbe(self._model, limits, self._device, largest=largest_of(self._shard)).check(self._who)

    def _score(self, requests: Sequence[RewardRequest]) -> RewardAnswer:
        steps = [steps_of(request, self._steps.separator, self._policy_tokenizer) for request in requests]
        judged = self.judge(requests, [s.texts for s in steps])
        ends = [s.tokens if len(s.texts) else np.flatnonzero(r.response_mask)[-1:]
                for s, r in zip(steps, requests, strict=True)]
        probabilities = [p if len(p) else np.zeros(1) for p in judged]
        failures = sum(not s.texts for s in steps)
        if self._config.placement == "outcome":
            outcomes = self._value(np.array([aggregate(p, self._config.aggregate) for p in probabilities]))
            return RewardAnswer(outcomes.astype(np.float32), failures=failures)
        rows = [placed(self._value(p), at, len(r.tokens))
                for p, at, r in zip(probabilities, ends, requests, strict=True)]
        sums = np.array([row.sum(dtype=np.float64) for row in rows], dtype=np.float32)
        return RewardAnswer(sums, np.concatenate(rows), failures)

    def _value(self, probability: NDArray[np.float64]) -> NDArray[np.float64]:
        """The reward of a probability."""
        return 2 * probability - 1 if self._config.value == "centred" else probability

    @torch.no_grad()
    def judge(self, requests: Sequence[RewardRequest], solutions: list[list[str]]) -> list[NDArray[np.float64]]:
        """[N] arrays with the probability that each step is good.

        Args:
            solutions: [N] texts of the steps that answer the requests' prompts.

        Raises:
            RewardError: one is not finite, or a row is over the model's context; names the samples.
        """
        prompts = encode_prompts(self._tokenizer, [self._prompt(request) for request in requests])
        rows, places = self._ids.rows(self._tokenizer, prompts, solutions)
        lengths = np.array([len(row) for row in rows])
        self._check_context(requests, lengths, self._longest, "tokens, placeholders included,")
        with_steps = np.flatnonzero([len(marks) > 0 for marks in places])

        def judged(plan: list[RowNumbers]) -> list[NDArray[np.float64]]:
            by_row: dict[int, NDArray[np.float64]] = {}
            for part in plan:
                batch = with_steps[part]
                starts = np.cumsum(lengths[batch]) - lengths[batch]
                marks = [start + np.array(places[i]) for start, i in zip(starts, batch, strict=True)]
                logits = self._model(*self._tensors([rows[i] for i in batch], lengths[batch], np.concatenate(marks)))
                good = step_values(logits, self._ids.labels, self._ids.values).double().cpu().numpy()
                by_row |= zip(part, np.split(good, np.cumsum([len(m) for m in marks])[:-1]), strict=True)
            return [by_row.get(row, np.zeros(0)) for row in range(len(with_steps))]

        probabilities: list[NDArray[np.float64]] = [np.zeros(0)] * len(rows)
        of_rows = self._divided(lengths[with_steps], max(self._budget, int(lengths.max())), judged)
        for row, values in zip(with_steps, of_rows, strict=True):
            probabilities[row] = values
        self._check_finite(probabilities, requests)
        return probabilities

    def _prompt(self, request: RewardRequest) -> PromptText:
        """The prompt as in this model's training: chat messages are rendered by its own template, if it has one."""
        if request.messages is None or not self._tokenizer.chat_template:
            return PromptText(request.prompt, None)
        place = sample_names([request.key])
        options = tools_of(request.metadata, place)
        text = ChatTemplate(self._tokenizer).render(request.messages, place, ask=True, options=options)
        return PromptText(text, request.messages, options)

    def _tensors(
        self, rows: list[list[int]], lengths: NDArray[np.int64], places: NDArray[np.int64]
    ) -> tuple[torch.Tensor, Packing, torch.Tensor]:
        tokens = torch.tensor([token for row in rows for token in row], device=self._device)
        return tokens, Packing.of(lengths, self._device), torch.as_tensor(places, device=self._device)

    def _check_finite(self, found: list[NDArray[np.float64]], requests: Sequence[RewardRequest]) -> None:
        wrong = [i for i, values in enumerate(found) if not np.isfinite(values).all()]
        if wrong:
            raise SampleError(
                f"{self._who} gave a step of {len(wrong)} of {len(found)} samples "
                f"({sample_names([requests[i].key for i in wrong])}) no finite probability. It "
                "is never replaced by a default: fix the model (its weights are damaged or its precision is too low)")


def placed(values: NDArray[np.float64], tokens: NDArray[np.int64], length: int) -> NDArray[np.float32]:
    """[length] float32: each value on its token; values of one token add up."""
    row = np.zeros(length)
    np.add.at(row, tokens, values)
    return row.astype(np.float32)


def aggregate(probabilities: NDArray[np.float64], kind: Aggregate) -> float:
    """One number for a solution's steps: their minimum, product (Lightman et al. 2023), mean, or the last one's."""
    match kind:
        case "min":
            return float(probabilities.min())
        case "prod":
            return float(probabilities.prod())
        case "mean":
            return float(probabilities.mean())
        case "last":
            return float(probabilities[-1])


@dataclass(frozen=True)
class Steps:
    """The steps of one response."""

    texts: list[str]
    """[S] without separators; none is blank."""
    tokens: NDArray[np.int64]
    """[S] index, in the request's tokens, of the last token that the policy wrote of each step."""


def steps_of(request: RewardRequest, separator: str, tokenizer: PreTrainedTokenizerBase) -> Steps:
    """Split the response of a request.

    A step includes the separators that follow it; the last one ends with the response, its end-of-sequence token
    included. A token in which several steps end is the last of each. If a step ends in tokens that were not sampled
    (tool output), it counts for the policy's last token before.

    Args:
        tokenizer: the policy's.
    """
    begin = response_start(request.response_mask)
    ids = request.tokens[begin:].tolist()
    text = _decode(tokenizer, ids)
    pieces = split_steps(text, separator)
    ends = [*_last_tokens(tokenizer, ids, text, [end for _, end in pieces[:-1]]), len(ids) - 1][: len(pieces)]
    written = np.where(request.response_mask, np.arange(len(request.tokens)), -1)
    before = np.maximum.accumulate(written)
    return Steps([piece for piece, _ in pieces], before[np.array(ends, dtype=np.int64) + begin])


def split_steps(text: str, separator: str) -> list[tuple[str, int]]:
    """(text, end) of each step, with the separators after it; the last one ends with the text."""
    steps: list[tuple[str, int]] = []
    end = 0
    for piece in text.split(separator):
        end = min(end + len(piece) + len(separator), len(text))
        if piece.strip():
            steps.append((piece, end))
        elif steps:
            steps[-1] = (steps[-1][0], end)
    return steps


def _last_tokens(tokenizer: PreTrainedTokenizerBase, ids: list[int], text: str, ends: list[int]) -> list[int]:
    """For each character position, ascending, the token that completes the text up to it.

    The text of a prefix of the tokens only grows with the prefix, so the shortest one that starts with `text[:end]` is
    found by bisection. A token with only some bytes of a character does not complete it.
    """
    tokens: list[int] = []
    for end in ends:
        low, high = (tokens[-1] if tokens else 0), len(ids) - 1
        while low < high:
            middle = (low + high) // 2
            if _decode(tokenizer, ids[: middle + 1]).startswith(text[:end]):
                high = middle
            else:
                low = middle + 1
        tokens.append(low)
    return tokens


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
