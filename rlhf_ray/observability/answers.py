"""A model's answers as a person sees them: coloured on a terminal, plain text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from rlhf_ray.observability.progress import is_terminal
from rlhf_ray.observability.tables import visible

ENDINGS = {"stop": "ended by itself", "length": "cut at --max-tokens", "abort": "aborted"}


def print_answer(row: Mapping[str, Any], stream: TextIO | None = None, prompt: bool = True) -> None:
    """Print one answer.

    Args:
        row: prompt, response, tokens, finish_reason and, where there is one, score.
        prompt: say the prompt too.
    """
    stream = stream or sys.stdout
    about = f"{row['tokens']} tokens, {ENDINGS.get(row['finish_reason'], row['finish_reason'])}"
    if row.get("score") is not None:
        about += f", score {row['score']:.4g}"
    asked, answered = visible(row["prompt"]).strip(), visible(row["response"]).strip()
    if not is_terminal(stream):
        stream.write((f"prompt: {asked}\n" if prompt else "") + f"response: {answered}\n({about})\n\n")
        stream.flush()
        return
    console = Console(file=stream, highlight=False)
    if prompt:
        console.print(Text(asked, style="dim"))
    console.print(Padding(Text(answered or "(nothing)", style="bold" if answered else "dim"), (0, 0, 0, 2)))
    console.print(Padding(Text(about, style="dim italic"), (0, 0, 1, 2)))
