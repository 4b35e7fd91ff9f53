"""`rlhf-ray generate`: try a model."""

import sys
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


def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model's directory or Hub name, or a run's "
                                         "directory (then its model/).")],
    prompt: Annotated[list[str] | None, typer.Option("--prompt", help="A prompt; may be given again.")] = None,
    file: Annotated[str | None, typer.Option("--file", help="Prompts: .jsonl, .csv, .parquet, .txt (a line each), or "
                                             "a Hub data set.")] = None,
    column: Column = "prompt",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    n: Annotated[int, typer.Option("--n", min=1, help="Answers to each prompt.")] = 1,
    seed: Seed = 0,
    chat: Chat = True,
    reward: Annotated[str | None, typer.Option("--reward", help="Score answers by a reward model, or by any "
                                               "scorer that `compare` takes.")] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Write the answers as JSON lines here.")] = None,
) -> None:
    """Ask a model: prompts from the command line, a file or a pipe, or typed one by one. Needs no Ray."""
    prepare_engine()
    from rlhf_ray.stages.generate import GenerateOptions, run

    run(GenerateOptions(
        model=model, sampling=sampling_of(max_tokens, temperature, top_p, top_k), prompts=prompt or (), file=file,
        column=column, n=n, seed=seed, chat=chat, output=output, reward=reward,
    ), sys.stdin)
