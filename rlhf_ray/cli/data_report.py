"""Prints an inspection: counts, row errors, a histogram of lengths, rows with their loss shown."""

from __future__ import annotations

from typing import TextIO

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from rlhf_ray.data.inspection import Example, Inspection
from rlhf_ray.observability.conversation import escaped
from rlhf_ray.observability.progress import is_terminal

BARS, WIDTH = 12, 40
"""Rows and characters of the histogram."""
LOSS_STYLE = "bold green"


def print_inspection(found: Inspection, kind: str, has_template: bool, stream: TextIO) -> None:
    """Print an inspection; tokens with loss are coloured in a terminal, and between « and » elsewhere."""
    plain = not is_terminal(stream)
    console = Console(file=stream, soft_wrap=True, highlight=False, no_color=plain)
    report, row_errors = found.report, found.row_errors
    console.print(Text(f"{report.source}, as {kind}: {report.kept:,} rows to use, {row_errors.count:,} malformed, "
                       f"{report.rows - report.kept:,} left out", style="bold"))
    if report.form:
        console.print(Text(f"read as {report.form}"))
    _print_row_errors(found, console)
    if len(found.lengths):
        _print_lengths(found.lengths, console)
    console.print(Text(f"the tokenizer has {'a' if has_template else 'no'} chat template"))
    for number, row in enumerate(found.examples, start=1):
        for example in row:
            _print_example(f"row {number}", example, plain, console)


def _print_row_errors(found: Inspection, console: Console) -> None:
    if found.row_errors.count:
        console.print(Text("malformed; training stops at "
                           f"{'them' if found.row_errors.count > 1 else 'it'}:", style="red"))
        for error in found.row_errors.messages:
            console.print(Text(f"  {error}"))
        if (more := found.row_errors.count - len(found.row_errors.first)) > 0:
            console.print(Text(f"  and {more:,} more (--unusable=FILE names all)"))
    for reason, left_out in found.report.left_out.items():
        console.print(Text(f"left out: {left_out.count:,} {reason} ({left_out.named(20, found.report.source)})"))
    for remark in found.report.remarks():
        console.print(Text(remark))


def _print_lengths(lengths: NDArray[np.int64], console: Console) -> None:
    low, middle, high, longest = np.percentile(lengths, [0, 50, 95, 100]).astype(int)
    console.print(Text(f"tokens a row: shortest {low}, median {middle}, 95% {high}, longest {longest}; "
                       f"{int(lengths.sum()):,} in all"))
    step = max(1, -(-(longest - low + 1) // BARS))
    starts = np.arange(low, longest + 1, step)
    counts = np.bincount((lengths - low) // step, minlength=len(starts))
    for start, count in zip(starts, counts, strict=True):
        bar = "█" * round(WIDTH * count / counts.max()) or ("▏" if count else "")
        console.print(Text(f"  {start:>6} - {start + step - 1:<6} {bar} {count:,}"))


def _print_example(title: str, example: Example, plain: bool, console: Console) -> None:
    name = f", {example.name}" if example.name else ""
    console.print(Text(f"{title}{name}: {example.tokens} tokens, {example.loss_tokens} with loss", style="bold"))
    for turn in example.outline:
        console.print(Text(f"  {escaped(turn)}"))
    if example.outline:
        console.print(Text("  as the model reads it:"))
    line = Text("  ")
    for text, loss in example.spans:
        shown = escaped(text).replace("\n", "\n  ")
        line.append(f"«{shown}»" if loss and plain else shown, style=LOSS_STYLE if loss else "dim")
    console.print(line)
