"""Commands that sample from models without Ray: `rlhf-ray generate` and `rlhf-ray compare`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rlhf_ray.config.generation import SamplingConfig

MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer, in tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0, help="Softmax temperature; 0 is greedy.")]
TopP = Annotated[float, typer.Option("--top-p", min=0.01, max=1, help="Nucleus sampling; 1 keeps everything.")]
TopK = Annotated[int, typer.Option("--top-k", min=0, help="Sample among the k likeliest tokens; 0 keeps all.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed; the same seed gives the same answers.")]
Column = Annotated[str, typer.Option("--column", help="Column of the file that holds the prompt.")]
Chat = Annotated[bool, typer.Option("--chat/--no-chat", help="Use the tokenizer's chat template, where it has one.")]


def sampling_of(max_tokens: int, temperature: float, top_p: float, top_k: int) -> "SamplingConfig":
    """The sampling that these options ask for."""
    from rlhf_ray.config.generation import SamplingConfig

    return SamplingConfig(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k)


def prepare_engine() -> None:
    """Set what counts only before torch and vLLM are imported, and quiet them: progress bars are for terminals, and
    some of vLLM's warnings come before it has read its own level."""
    import logging
    import os

    from rlhf_ray.cli.library_logging import quiet_libraries
    from rlhf_ray.config.generation import GenerationConfig
    from rlhf_ray.roles.engines.vllm_adapter import generator_environment

    threads = len(os.sched_getaffinity(0))
    for name, value in generator_environment(GenerationConfig(engine="in_process", threads=threads)).items():
        os.environ.setdefault(name, value)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    quiet_libraries()


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
