"""Checks of data sections before training: rows as a stage would load them, with examples, and all malformed rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.config.algorithm import PtxConfig
from rlhf_ray.config.data import (
    DataSection,
    DemonstrationsConfig,
    PreferencesConfig,
    ProcessRowsConfig,
    PromptsConfig,
    StepsConfig,
)
from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.data.answers import turns_with_loss
from rlhf_ray.data.chat import ASSISTANT, Messages, carries_loss, checked_messages, tools_of
from rlhf_ray.data.demonstrations import DemonstrationFormat, load_demonstrations, load_pretraining_text
from rlhf_ray.data.encoding import decode_after
from rlhf_ray.data.found_columns import columns_found, with_found_columns
from rlhf_ray.data.load_report import LoadReport, RowErrors
from rlhf_ray.data.preferences import load_preferences
from rlhf_ray.data.prompts import stream_prompts
from rlhf_ray.data.row_readers import usable_blocks
from rlhf_ray.data.stepwise_supervision import IGNORE, load_process_rows
from rlhf_ray.data.tool_messages import TOOL, TOOL_CALLS, TOOLS
from rlhf_ray.errors import ConfigError
from rlhf_ray.records import Ragged

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS: dict[str, type[DataSection]] = {
    "prompts": PromptsConfig, "demonstrations": DemonstrationsConfig, "preferences": PreferencesConfig,
    "process": ProcessRowsConfig,
}
"""Kinds of data sets."""
Span = tuple[str, bool]
"""(text of neighbouring tokens, whether they carry loss)."""


@dataclass
class Example:
    """One row as the model reads it."""

    name: str
    """"" or which side of a pair it is."""
    spans: list[Span]
    tokens: int
    loss_tokens: int
    outline: list[str] = field(default_factory=list)
    """The tools and turns of a conversation with tools, a line each."""


@dataclass
class Inspection:
    """The result of inspecting a data set."""

    report: LoadReport
    row_errors: RowErrors
    lengths: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """[N] tokens of each usable row (of a pair, both sides)."""
    examples: list[list[Example]] = field(default_factory=list)
    """The first rows; a pair is two examples."""


def kind_of(columns: set[str]) -> str:
    """The kind of data set with these columns.

    Raises:
        ConfigError: the columns match no kind.
    """
    marks = {"preferences": {"chosen", "rejected"} <= columns, "process": {"steps", "labels"} <= columns,
             "demonstrations": columns_found(columns) is not None, "prompts": "prompt" in columns}
    for kind, matches in marks.items():
        if matches:
            return kind
    raise ConfigError(f"the columns {sorted(columns)} match no kind of data; set --kind={'|'.join(KINDS)}, and the "
                      "columns (--column=..., --text=..., --chosen=...)")


def inspect(config: DataSection, tokenizer: PreTrainedTokenizerBase, rows: int,
            steps: StepsConfig | None = None, model: ModelConfig | NewModelConfig | None = None) -> Inspection:
    """Load a section that is not a mix, and keep its first `rows` rows as text.

    Args:
        steps: how steps are written, for process-labelled rows.
        model: as in `named_stop_tokens`.

    Raises:
        DataError, ModelError: the data set cannot be read.
    """
    if isinstance(config, DemonstrationsConfig):
        config = with_found_columns(config)
    inspection = Inspection(LoadReport(config.location), RowErrors(lenient=True))
    lengths = []
    for block in _blocks(config, tokenizer, inspection, steps, model):
        lengths.append(block.lengths)
        for i in range(min(len(block), rows - len(inspection.examples))):
            inspection.examples.append(_examples(block, i, tokenizer))
    inspection.lengths = np.concatenate([inspection.lengths, *lengths])
    if isinstance(config, DemonstrationsConfig) and config.messages is not None:  # their records have tokens alone
        talks = _conversations(config, tokenizer, model)
        for [example], (tools, messages, losses) in zip(inspection.examples, talks, strict=False):
            example.outline = _outline(tools, messages, losses)
    return inspection


Conversation = tuple[list[dict[str, Any]], Messages, list[int]]
"""(tools, messages, number of tokens of each run of tokens with loss)."""


def _conversations(config: DemonstrationsConfig, tokenizer: PreTrainedTokenizerBase,
                   model: ModelConfig | NewModelConfig | None) -> Iterator[Conversation]:
    """The usable rows once more, in their order, as they are written."""
    form, column = DemonstrationFormat(config, tokenizer, model), config.messages or ""
    for rows, values in usable_blocks(config, RowErrors(lenient=True), form.read):
        for i, value in enumerate(values):
            [(tokens, mask)] = form.encode([value])
            if 0 < len(tokens) <= config.max_tokens:
                place = rows.place(i)
                yield (tools_of(rows.records[i], place).get(TOOLS, []),
                       checked_messages(rows.value(i, column), place, column),
                       [stop - start for start, stop in turns_with_loss(mask)])


def _outline(tools: list[dict[str, Any]], messages: Messages, losses: list[int]) -> list[str]:
    """A line for the tools and one for each message; [] if there are neither tools nor calls nor results.

    Args:
        losses: tokens with loss of each turn that carries it.
    """
    if not tools and not any(message["role"] == TOOL or TOOL_CALLS in message for message in messages):
        return []
    learned = [m for m in messages if m["role"] == ASSISTANT and carries_loss(m, "", "")]
    counts = dict(zip(map(id, learned), losses, strict=True)) if len(learned) == len(losses) else {}
    lines = [f"tools: {', '.join(_signature(tool['function']) for tool in tools) or 'none'}"]
    for message in messages:
        who, said = str(message["role"]), _on_one_line(str(message["content"]))
        if message["role"] == TOOL and message.get("name"):
            who += f" {message['name']}"
        calls = ", ".join(_call(each["function"]) for each in message.get(TOOL_CALLS, []))
        parts = [part for part in (said, f"calls {calls}" if calls else "") if part]
        loss = ""
        if message["role"] == ASSISTANT:
            loss = "  (no loss)" if message not in learned else ""
            loss = f"  ({counts[id(message)]} tokens with loss)" if id(message) in counts else loss
        lines.append(f"{who}: {' '.join(parts)}{loss}")
    return lines


def _signature(function: Mapping[str, Any]) -> str:
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return f"{function['name']}({', '.join(properties or ())})"


def _call(function: Mapping[str, Any]) -> str:
    arguments = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in function["arguments"].items())
    return f"{function['name']}({', '.join(arguments)})"


LONGEST = 120
"""Characters of a message in an outline."""


def _on_one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _blocks(config: DataSection, tokenizer: PreTrainedTokenizerBase, inspection: Inspection,
            steps: StepsConfig | None, model: ModelConfig | NewModelConfig | None) -> Iterator[Any]:
    """Blocks of usable rows; `inspection` gets their report."""
    if isinstance(config, PromptsConfig):
        yield from stream_prompts(config, tokenizer, inspection.report, inspection.row_errors)
    elif isinstance(config, DemonstrationsConfig):
        sequences, inspection.report = load_demonstrations(config, tokenizer, inspection.row_errors, model)
        yield sequences
    elif isinstance(config, PtxConfig):
        sequences, inspection.report = load_pretraining_text(config, tokenizer)
        yield sequences
    elif isinstance(config, PreferencesConfig):
        pairs, _, inspection.report = load_preferences(config, tokenizer, inspection.row_errors, model)
        yield pairs
    elif isinstance(config, ProcessRowsConfig) and steps:
        solutions, _, inspection.report = load_process_rows(config, steps, tokenizer, inspection.row_errors)
        yield solutions


def _examples(block: Any, i: int, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """Row i of a block of any kind."""
    if hasattr(block, "chosen"):
        return [_example(side, i, tokenizer, name) for name, side in (("chosen", block.chosen),
                                                                      ("rejected", block.rejected))]
    return [_example(block, i, tokenizer, "")]


def _example(rows: Ragged, i: int, tokenizer: PreTrainedTokenizerBase, name: str) -> Example:
    tokens, mask = rows.row(i, "tokens"), _loss(rows, i)
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(tokens)]
    ids = tokens.tolist()
    spans = [(decode_after(tokenizer, ids[:a], ids[a:b]), bool(mask[a])) for a, b in pairwise(edges)]
    return Example(name, spans, len(tokens), int(mask.sum()))


def _loss(rows: Ragged, i: int) -> NDArray[np.bool_]:
    """[T] True on the tokens of row i that carry loss: none of a prompt's, a step's label at its placeholder."""
    if hasattr(rows, "loss_mask"):
        return np.asarray(rows.row(i, "loss_mask"))
    if hasattr(rows, "placeholders"):
        return np.asarray(rows.row(i, "placeholders") & (rows.row(i, "labels") != IGNORE))
    return np.zeros(int(rows.lengths[i]), dtype=bool)
