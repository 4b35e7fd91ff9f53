"""`rlhf-ray compare`: which of two models answers better."""

from pathlib import Path
from typing import Annotated

import typer

from rlhf_ray.cli.options import (
    Chat,
    Column,
    MaxTokens,
    Seed,
    Temperature,
    TopK,
    TopP,
    prepare_engine,
    sampling_of,
)


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="A model's directory or Hub name, or a run's directory.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The model that is compared with it.")],
    prompts: Annotated[str, typer.Option("--prompts", help="Prompts: .jsonl, .csv, .parquet, .txt (a line each), or a "
                                         "Hub data set.")],
    scorer: Annotated[str, typer.Option(
        "--scorer", help="Who decides: a reward model, vader, exact_match or number (against the column `answer`), "
        "file.py:function, an http address, or a .yaml file with a `rewards` section.")],
    column: Column = "prompt",
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Use the first prompts only.")] = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    n: Annotated[int, typer.Option("--n", min=1, help="Pairs of answers to each prompt.")] = 1,
    seed: Seed = 0,
    tie: Annotated[float, typer.Option("--tie", min=0, help="Scores at most this far apart are a tie.")] = 0.0,
    chat: Chat = True,
    output: Annotated[Path, typer.Option("--output", help="Page to write; numbers go beside it, as .json.")] = Path(
        "compare.html"),
) -> None:
    """Let two models answer the same prompts, and a scorer say who wins: a rate with interval, a page of texts."""
    prepare_engine()
    from rlhf_ray.stages.compare import CompareOptions, run

    run(CompareOptions(
        first=a, second=b, prompts=prompts, scorer=scorer, output=output, column=column, limit=limit, n=n, seed=seed,
        sampling=sampling_of(max_tokens, temperature, top_p, top_k), tie=tie, chat=chat,
    ))
