"""Options that commands share, and how sampling is made of them."""

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
    import sys

    from rlhf_ray.cli.quiet import quiet_libraries
    from rlhf_ray.config.generation import GenerationConfig
    from rlhf_ray.roles.engines.settings import generator_environment

    threads = len(os.sched_getaffinity(0))
    for name, value in generator_environment(GenerationConfig(engine="in_process", threads=threads)).items():
        os.environ.setdefault(name, value)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    quiet_libraries()
