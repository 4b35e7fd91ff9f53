"""Commands that sample from models without Ray: `rlhf-ray generate` and `rlhf-ray compare`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf_ray.cli.paths import local_path, path_or_name

if TYPE_CHECKING:
    from rlhf_ray.config.generation import SamplingConfig

MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Maximum response length in tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0, help="Softmax temperature; 0 is greedy.")]
TopP = Annotated[float, typer.Option("--top-p", min=0.01, max=1, help="Nucleus sampling; 1 keeps all tokens.")]
TopK = Annotated[int, typer.Option("--top-k", min=0, help="Sample among the k most likely tokens; 0 keeps all.")]
MinP = Annotated[float, typer.Option("--min-p", min=0, max=1, help="Sample among tokens with at least this part of the "
                                     "most likely one's probability.")]
RepetitionPenalty = Annotated[float, typer.Option(
    "--repetition-penalty", help="Above 1, tokens that are in the prompt or the response become less likely.")]
MinTokens = Annotated[int, typer.Option("--min-tokens", min=0, help="Minimum response length in tokens.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="A text that ends a response; may be repeated.")]
StopTokenId = Annotated[list[int] | None, typer.Option("--stop-token-id", help="A token that ends a response, besides "
                                                       "the model's own; may be repeated.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed; the same seed gives the same responses.")]
Column = Annotated[str, typer.Option("--column", help="Column of the file that holds the prompt.")]
Environment = Annotated[str | None, typer.Option("--environment", parser=path_or_name, metavar="TEXT",
    help="Play episodes: file.py:name or module:name of tools, a class with tools or an environment, or a .yaml file "
    "with a section `environments`. Rewards are the environment's.")]
MaxTurns = Annotated[int | None, typer.Option("--max-turns", min=1, show_default=False,
    help="Turns of an episode at most; if not given, 16, or as the .yaml file says.")]
Chat = Annotated[bool, typer.Option("--chat/--no-chat", help="Use the tokenizer's chat template, if it has one.")]


def sampling_of(stop: list[str] | None, stop_token_id: list[int] | None, **options: Any) -> "SamplingConfig":
    """Sampling settings from the options.

    Raises:
        ConfigError: an option is invalid; names it.
    """
    import logging

    from pydantic import ValidationError

    from rlhf_ray.config.generation import SamplingConfig
    from rlhf_ray.errors import ConfigError

    without_effect = [name for name, keeps_all in (("top_p", 1), ("top_k", 0), ("min_p", 0))
                      if options["temperature"] == 0 and options[name] != keeps_all]
    if without_effect:
        named = ", ".join(f"--{name.replace('_', '-')}={options[name]:g}" for name in without_effect)
        logging.getLogger(__name__).warning(f"{named} without effect: --temperature 0 takes the most likely token")
    try:
        return SamplingConfig.model_validate({"stop": stop or [], "stop_token_ids": stop_token_id or [], **options})
    except ValidationError as error:
        problems = [": ".join([*map(str, problem["loc"]), problem["msg"].removeprefix("Value error, ")])
                    for problem in error.errors()]
        raise ConfigError(f"invalid sampling options: {'; '.join(problems)}") from None


def prepare_engine() -> None:
    """Set environment variables and log levels that must be set before torch and vLLM are imported."""
    import logging
    import os

    from rlhf_ray.config.generation import GenerationConfig
    from rlhf_ray.roles.engines.vllm_adapter import generator_environment

    threads = len(os.sched_getaffinity(0))
    for name, value in generator_environment(GenerationConfig(engine="in_process", threads=threads)).items():
        os.environ.setdefault(name, value)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


def generate(
    model: Annotated[str, typer.Argument(parser=path_or_name, metavar="MODEL",
        help="A model's directory or Hub name, or a run's "
                                         "directory (then its model/).")],
    prompt: Annotated[list[str] | None, typer.Option("--prompt", help="A prompt; may be repeated.")] = None,
    file: Annotated[str | None, typer.Option("--file", parser=path_or_name, metavar="TEXT",
        help="Prompts: .jsonl, .csv, .parquet, .txt (a line each), or "
                                             "a Hub data set.")] = None,
    column: Column = "prompt",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    min_tokens: MinTokens = 0,
    stop: Stop = None,
    stop_token_id: StopTokenId = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Responses per prompt.")] = 1,
    seed: Seed = 0,
    chat: Chat = True,
    reward: Annotated[str | None, typer.Option("--reward", parser=path_or_name, metavar="TEXT",
        help="Score responses with a reward model, or any "
                                               "scorer that `compare` accepts.")] = None,
    output: Annotated[Path | None, typer.Option("--output", parser=local_path, metavar="PATH",
        help="Write responses or episodes to this file as JSON lines.")] = None,
    environment: Environment = None,
    max_turns: MaxTurns = None,
) -> None:
    """Generate responses to prompts from the command line, a file, a pipe or the keyboard, without Ray.

    With --environment, each prompt is the row of an episode, which is shown turn by turn with tool calls, answers,
    rewards and the cause of its end.
    """
    prepare_engine()
    from rlhf_ray.stages.generate import GenerateOptions, run

    sampling = sampling_of(
        stop, stop_token_id, max_tokens=max_tokens, min_tokens=min_tokens, temperature=temperature, top_p=top_p,
        top_k=top_k, min_p=min_p, repetition_penalty=repetition_penalty)
    run(GenerateOptions(
        model=model, sampling=sampling, prompts=prompt or (), file=file, column=column, n=n, seed=seed, chat=chat,
        output=output, reward=reward, environment=environment, max_turns=max_turns,
    ), sys.stdin)


def compare(
    a: Annotated[str, typer.Argument(parser=path_or_name, metavar="A",
        help="A model's directory or Hub name, or a run's directory.")],
    b: Annotated[str, typer.Argument(parser=path_or_name, metavar="B", help="The model to compare with A.")],
    prompts: Annotated[str, typer.Option("--prompts", parser=path_or_name, metavar="TEXT",
        help="Prompts: .jsonl, .csv, .parquet, .txt (a line each), or a "
                                         "Hub data set.")],
    scorer: Annotated[str | None, typer.Option(
        "--scorer", parser=path_or_name, metavar="TEXT",
        help="The judge: a reward model, vader, exact_match or number (against the column `answer`), "
        "file.py:function, an http address, or a .yaml file with a `rewards` section.")] = None,
    environment: Environment = None,
    max_turns: MaxTurns = None,
    column: Column = "prompt",
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Use only the first prompts.")] = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    min_tokens: MinTokens = 0,
    stop: Stop = None,
    stop_token_id: StopTokenId = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Pairs of responses per prompt.")] = 1,
    seed: Seed = 0,
    tie: Annotated[float, typer.Option("--tie", min=0, help="Scores that differ by at most this are a tie.")] = 0.0,
    chat: Chat = True,
    output: Annotated[Path, typer.Option("--output", parser=local_path, metavar="PATH",
        help="Page to write; numbers go to a .json next to it.")] = Path(
        "compare.html"),
) -> None:
    """Compare two models on the same prompts by a scorer, or by the rewards of their episodes in an environment: win
    rate with interval, and a page of texts."""
    prepare_engine()
    from rlhf_ray.stages.compare import CompareOptions, run

    sampling = sampling_of(
        stop, stop_token_id, max_tokens=max_tokens, min_tokens=min_tokens, temperature=temperature, top_p=top_p,
        top_k=top_k, min_p=min_p, repetition_penalty=repetition_penalty)
    run(CompareOptions(
        first=a, second=b, prompts=prompts, scorer=scorer, output=output, column=column, limit=limit, n=n, seed=seed,
        sampling=sampling, tie=tie, chat=chat, environment=environment, max_turns=max_turns,
    ))
