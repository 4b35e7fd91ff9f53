"""Preference pairs for reward models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.config.data import PreferencesConfig
from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.data.answers import AnswerFormat, TurnEnds
from rlhf_ray.data.chat import (
    ASSISTANT,
    LOSS_KEYS,
    Messages,
    PromptFormat,
    PromptText,
    carries_loss,
    checked_messages,
    checked_response,
    contents,
    identity,
    messages_within,
    template_options,
)
from rlhf_ray.data.encoding import Encoded, Piece, begins_already, encode_pieces, encode_prompts
from rlhf_ray.data.held_out import group_digest
from rlhf_ray.data.load_report import LoadReport, RowErrors
from rlhf_ray.data.row_readers import usable_blocks
from rlhf_ray.data.rows import Rows, checked_text
from rlhf_ray.data.supervised_records import Pairs, sequences_of
from rlhf_ray.data.tool_messages import TOOL_CALLS
from rlhf_ray.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAME = "chosen and rejected are the same"
EMPTY = "a side is neither a text nor finished"


def load_preferences(config: PreferencesConfig, tokenizer: PreTrainedTokenizerBase,
                     row_errors: RowErrors | None = None, model: ModelConfig | NewModelConfig | None = None,
                     ) -> tuple[Pairs, NDArray[np.uint64], LoadReport]:
    """(pairs, [N] `group_digest` of each pair's prompt, report of what was left out: equal sides, empty sides, longer
    sides) of one data set.

    A side ends as a finished response does when it is scored during PPO: with the first token that ends a response in
    what the chat template writes after an answer, where the prompt is chat messages, else with the end-of-sequence
    token. Optional columns `chosen_finished` and `rejected_finished` say that a text is a response as it was sampled,
    which continues the prompt as it is. They are false for one that was cut at the length limit: it is scored without
    an end in PPO, so it is trained without one. With `config.margin` each pair has its margin.

    Args:
        config: a section that is not a mix.
        row_errors: collects malformed rows; None raises an error instead.
        model: as in `named_stop_tokens`.

    Raises:
        DataError: a file or rows that cannot be used (named), or no pair left.
        ModelError: no end-of-sequence token, or chat messages without a template.
    """
    row_errors = row_errors or RowErrors()
    form = PreferenceFormat(config, tokenizer, model)
    report = LoadReport(config.location, already=form.already)
    blocks = [Pairs(sequences_of([]), sequences_of([]))]
    digests: list[int] = []
    for rows, values in usable_blocks(config, row_errors, form.read):
        pairs, prompt_lengths = form.encode(values)
        kept = _keep(report, rows, pairs, prompt_lengths, config.max_tokens)
        blocks.append(pairs.select(kept))
        digests += [group_digest(form.group(values[i])) for i in kept]
    row_errors.finish(report, "Give pairs whose sides differ, and raise max_tokens if they are too long")
    return Pairs.concat(blocks), np.array(digests, dtype=np.uint64), report


def _keep(report: LoadReport, rows: Rows, pairs: Pairs, prompt_lengths: NDArray[np.int64],
          max_tokens: int) -> NDArray[np.int64]:
    """The pairs of a block that can be used."""
    chosen, rejected = pairs.chosen, pairs.rejected
    same = np.array([np.array_equal(chosen.row(i, "tokens"), rejected.row(i, "tokens")) for i in range(len(rows))])
    shortest, longest = np.minimum(chosen.lengths, rejected.lengths), np.maximum(chosen.lengths, rejected.lengths)
    return report.keep(rows, {SAME: same, EMPTY: shortest == prompt_lengths,
                              f"a side is longer than max_tokens={max_tokens}": longest > max_tokens})


@dataclass(frozen=True)
class Side:
    """One of two responses."""

    text: str
    finished: bool


@dataclass(frozen=True)
class PairText:
    """One pair."""

    prompt: PromptText
    chosen: Side
    rejected: Side
    margin: float | None


class PreferenceFormat:
    """How the columns of one data set are read."""

    def __init__(self, config: PreferencesConfig, tokenizer: PreTrainedTokenizerBase,
                 model: ModelConfig | NewModelConfig | None = None) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._ends = TurnEnds.of(tokenizer, model)
        self._prompts = PromptFormat(
            tokenizer, config.prompt, system=config.system, as_chat=config.as_chat, may_be_empty=True)
        self._answers = AnswerFormat(self._prompts.template, self._ends)
        self.already = self._ends.already
        """How many texts had each beginning or end already."""

    def read(self, rows: Rows, i: int) -> PairText:
        """The pair of row i.

        Raises:
            DataError, ModelError: the row cannot be used.
        """
        config, place = self._config, rows.place(i)
        values = {column: messages_within(rows.value(i, column), place, column)
                  for column in (config.chosen, config.rejected)}
        chats = {c: checked_messages(v, place, c) for c, v in values.items() if isinstance(v, list)}
        if chats and len(chats) < len(values):
            raise DataError(f"{place}: {config.chosen!r} and {config.rejected!r} must both be texts, or both "
                            "messages; change one")
        prompt = (self._prompt_of_conversations(rows, i, chats) if self._are_whole(chats)
                  else self._prompts.read(rows, i, as_chat=bool(chats)))
        if prompt.messages is None:
            self.already.update(begins_already(self._tokenizer, prompt.text))
        chosen, rejected = (
            self._side(rows, i, column, flag, prompt, chats)
            for column, flag in ((config.chosen, "chosen_finished"), (config.rejected, "rejected_finished")))
        return PairText(prompt, chosen, rejected, None if config.margin is None else _margin(rows, i, config.margin))

    def group(self, pair: PairText) -> str:
        """What pairs share that are held out together."""
        return identity(pair.prompt.text, pair.prompt.messages, self._config.system) or pair.chosen.text

    def encode(self, values: list[PairText]) -> tuple[Pairs, NDArray[np.int64]]:
        """(pairs, [N] tokens of their prompts)."""
        sides = [sequences_of(self._encode([(v.prompt, getattr(v, name)) for v in values]))
                 for name in ("chosen", "rejected")]
        margins = None if self._config.margin is None else np.array([v.margin for v in values], dtype=np.float32)
        prompts = encode_prompts(self._tokenizer, [v.prompt for v in values])
        return Pairs(sides[0], sides[1], margins), np.array([len(p) for p in prompts], dtype=np.int64)

    def _encode(self, sides: list[tuple[PromptText, Side]]) -> list[Encoded]:
        rows = encode_pieces(self._tokenizer, [[Piece.of(p), Piece(side.text, loss=True)] for p, side in sides])
        return [self._end(row, side) for row, (_, side) in zip(rows, sides, strict=True)]

    def _end(self, row: Encoded, side: Side) -> Encoded:
        return self._ends.close(row) if side.finished else row

    @staticmethod
    def _are_whole(chats: dict[str, Messages]) -> bool:
        """Whether the sides are conversations that include the prompt."""
        return any(messages[0]["role"] != ASSISTANT for messages in chats.values())

    def _prompt_of_conversations(self, rows: Rows, i: int, chats: dict[str, Messages]) -> PromptText:
        """The prompt that two conversations share: all but their last message."""
        place = rows.place(i)
        chosen, rejected = chats.values()
        if chosen[:-1] != rejected[:-1] or not chosen[:-1] or chosen[-1]["role"] != ASSISTANT:
            raise DataError(f"{place}: the two conversations must be the same but for their last message, the "
                            f"assistant's; their roles are {[m['role'] for m in chosen]} and "
                            f"{[m['role'] for m in rejected]}")
        return self._prompts.chat(chosen[:-1], place, template_options(rows.records[i], place))

    def _side(self, rows: Rows, i: int, column: str, flag: str, prompt: PromptText,
              chats: dict[str, Messages]) -> Side:
        """One side; it may be empty only if the row has a column for how its response ended."""
        place, sampled = rows.place(i), rows.records[i].get(flag) is not None
        finished = rows.flag(i, flag, default=True)
        if column not in chats:
            text = checked_response(rows.value(i, column), place, column, may_be_empty=sampled)
            text = self._ends.body(text, place, column)
            if prompt.messages is None or not finished:
                return Side(text, finished)
            return Side(self._answers.of_text(prompt, text, place, sampled=sampled), finished)
        answer = self._answers.cleaned(chats[column][-1:] if self._are_whole(chats) else chats[column], place, column)
        calls = any(TOOL_CALLS in message for message in answer)
        checked_text(contents(answer), place, column, may_be_empty=sampled or calls)
        if answer[-1]["role"] != ASSISTANT:
            raise DataError(f"{place}: the messages of column {column!r} end with the role {answer[-1]['role']!r}; a "
                            f"response ends with the {ASSISTANT}'s")
        if not all(carries_loss(message, place, column) for message in answer):
            raise DataError(f"{place}: column {column!r} has a message that is not to be learned (a key of "
                            f"{', '.join(LOSS_KEYS)}), and both sides of a pair are compared whole; remove the key, "
                            "or the row")
        if not finished and calls:
            raise DataError(f"{place}: column {column!r} calls tools, and {flag} says that the response was cut; give "
                            "it as the text that was sampled")
        if not finished:
            return Side(contents(answer), finished)
        before = [*(prompt.messages or []), *answer[:-1]]
        begun = prompt.text
        between = ""
        if len(answer) > 1:
            whole = self._prompts.template.render(before, place, ask=True, options=prompt.options)
            if not whole.startswith(prompt.text):
                raise DataError(f"{place}: with this tokenizer's chat template the answered conversation does not "
                                f"begin with the question; give column {column!r} as texts")
            begun, between = whole, whole[len(prompt.text) :]
        return Side(between + self._answers.of_message(begun, before, answer[-1], place, prompt.options), finished)


def _margin(rows: Rows, i: int, column: str) -> float:
    margin = rows.number(i, column)
    if margin < 0:
        raise DataError(f"{rows.place(i)}: column {column!r} is {margin:g}; a margin says how much better the chosen "
                        "response is, so exchange chosen and rejected, or give 0")
    return margin
