"""`rlhf-ray generate`: answers of a model to prompts, without Ray, a configuration or a run."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from rlhf_ray.config.environment_names import named_environments
from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.prompts import sample_seed
from rlhf_ray.errors import ConfigError, DataError
from rlhf_ray.files.writing import write_atomically
from rlhf_ray.models.model_families import Use, check_family
from rlhf_ray.observability.conversation import escaped
from rlhf_ray.observability.progress import is_terminal
from rlhf_ray.observability.sample_export import json_of, write_json_lines
from rlhf_ray.observability.sample_view import print_samples, sample_of
from rlhf_ray.rewards.protocol import RewardRequest
from rlhf_ray.roles.local_episodes import LocalEpisodes
from rlhf_ray.roles.local_generator import LocalGenerator
from rlhf_ray.roles.prompt_input import PromptInput, prompt_inputs_of_lines, read_prompt_inputs
from rlhf_ray.stages.preflight import check_end_tokens, check_stop_tokens
from rlhf_ray.stages.resolve_model import check_output, model_at
from rlhf_ray.stages.scorers import Scorer, check_answers, check_scorer, scorer_of

TALK_ROOM = 1024
"""Tokens reserved for each prompt of a conversation, up to the model's context."""


@dataclass(frozen=True)
class GenerateOptions:
    """Options of the command line."""

    model: str
    sampling: SamplingConfig
    prompts: Sequence[str] = ()
    file: str | None = None
    column: str = "prompt"
    n: int = 1
    """Answers for each prompt."""
    seed: int = 0
    chat: bool = True
    """Use the tokenizer's chat template, if it has one."""
    output: Path | None = None
    """JSON lines file to write, one row per answer."""
    reward: str | None = None
    """Scorer of the answers, as in `scorers.scorer_of`."""
    environment: str | None = None
    """Plays episodes, as in `config.environment_names`; None: each answer is one response."""
    max_turns: int | None = None
    """Of an episode; None: the environment's."""


def run(options: GenerateOptions, stdin: TextIO) -> list[dict[str, Any]]:
    """Answer prompts from the command line, a file or a pipe; on a terminal without prompts, ask for them one by one.

    Returns:
        A row for each answer, or for each episode (as `samples --jsonl` writes them).

    Raises:
        RLHFError: the command failed; the message says what to do.
    """
    _refuse_contradictions(options)
    talking = not options.prompts and options.file is None and stdin.isatty()
    if talking and options.environment is not None:
        raise ConfigError("--environment plays an episode for each row of --file, --prompt or a pipe, and there are "
                          "none")
    if talking and options.output:
        raise ConfigError("--output takes the answers to prompts from --prompt, --file or a pipe, and there are none")
    if options.output:
        check_output(options.output)
    if options.environment is not None:
        return asyncio.run(_episodes(options, options.environment, stdin))
    rows = asyncio.run(_GenerateSession(options).ask([] if talking else _questions(options, stdin), talking))
    if options.output:
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomically(options.output, lines.encode())
        print(f"wrote {len(rows)} answers to {options.output}", file=sys.stderr)
    return rows


def _refuse_contradictions(options: GenerateOptions) -> None:
    if options.prompts and options.file is not None:
        raise ConfigError("prompts come from --prompt or from --file, not from both")
    refuse_without_effect(options.environment, options.max_turns, options.chat)
    if options.environment is not None and options.reward is not None:
        raise ConfigError(f"--reward {options.reward} scores responses, and the rewards of an episode are those of "
                          "--environment; leave one of them away")
    if options.n > 1 and options.sampling.temperature == 0:
        raise ConfigError(f"--temperature 0 gives the same answer {options.n} times; leave --n away, or raise it")


def refuse_without_effect(environment: str | None, max_turns: int | None, chat: bool) -> None:
    """Refuse options that would not act, with --environment or without.

    Raises:
        ConfigError: names the option.
    """
    if environment is None and max_turns is not None:
        raise ConfigError(f"--max-turns {max_turns} is of episodes, and there is no --environment; leave it away")
    if environment is not None and not chat:
        raise ConfigError("--no-chat leaves the chat template away, in which --environment answers; leave it away")


def _questions(options: GenerateOptions, stdin: TextIO) -> list[PromptInput]:
    if options.prompts:
        return [PromptInput(text, f"--prompt {number}") for number, text in enumerate(options.prompts, start=1)]
    if options.file is not None:
        return read_prompt_inputs(options.file, options.column)
    return prompt_inputs_of_lines(stdin, "standard input", options.column)


async def _episodes(options: GenerateOptions, environment: str, stdin: TextIO) -> list[dict[str, Any]]:
    """Play episodes, print or write them; returns them as `samples --jsonl` writes them."""
    model = model_of(options.model, "MODEL", options.sampling)
    environments = named_environments(environment, options.max_turns)
    questions = _questions(options, stdin)
    print(f"playing {len(questions) * options.n} episodes", file=sys.stderr)
    rows = await played(model, environments, options.sampling, options.seed, questions, options.n)
    if options.output:
        lines = StringIO()
        write_json_lines(rows, lines)
        write_atomically(options.output, lines.getvalue().encode())
        print(f"wrote {len(rows)} episodes to {options.output}", file=sys.stderr)
    else:
        samples = [sample_of(row) for row in rows]
        shown = [(f"episode {number} of {len(samples)}", sample) for number, sample in enumerate(samples, 1)]
        print_samples(Console(highlight=False, soft_wrap=True), samples, shown, full=True)
    return [json_of(row) for row in rows]


async def played(
    model: ModelConfig, environments: Mapping[str, EnvironmentConfig], sampling: SamplingConfig, seed: int,
    questions: Sequence[PromptInput], n: int,
) -> list[dict[str, Any]]:
    """Episodes of one model as rows of samples/; the model is unloaded afterwards. What environments print goes to
    standard error."""
    episodes = LocalEpisodes(model, environments, sampling, seed)
    try:
        await episodes.start(questions)
        rows = await episodes.play(questions, n)
        for line in episodes.printed():
            print(line, file=sys.stderr)
        return rows
    finally:
        await episodes.stop()


def model_of(name: str, argument: str, sampling: SamplingConfig) -> ModelConfig:
    """The model of an argument of the command line, after the checks that need no engine; raises as they do."""
    model, notice = model_at(name, argument)
    if notice:
        print(notice, file=sys.stderr)
    check_end_tokens(model, argument)
    check_family(model, argument, {Use.GENERATION})
    check_stop_tokens(model, sampling, "--stop-token-id")
    return model


class _GenerateSession:
    """A model, an optional scorer, and the options of the command."""

    def __init__(self, options: GenerateOptions) -> None:
        self._options = options
        self._model = model_of(options.model, "MODEL", options.sampling)
        if options.reward:
            check_scorer(options.reward, self._model, "--reward")
        self._scorer: Scorer | None = scorer_of(options.reward, self._model) if options.reward else None

    async def ask(self, questions: Sequence[PromptInput], talking: bool) -> list[dict[str, Any]]:
        """Load, answer, unload. Returns the answers as rows; none for a conversation."""
        options = self._options
        if options.reward:
            check_answers(options.reward, questions, self._model, "--reward")
        sequences = min(64, max(1, len(questions)) * options.n)
        generator = LocalGenerator(self._model, options.sampling, options.seed, options.chat, sequences)
        await generator.start(questions, prompt_tokens=TALK_ROOM if talking else 0)
        try:
            if self._scorer:
                await self._scorer.start()
            if talking:
                await self._talk(generator)
                return []
            return await self._answer(generator, questions, 0, show=options.output is None)
        finally:
            await generator.stop()
            if self._scorer:
                await self._scorer.stop()

    async def _talk(self, generator: LocalGenerator) -> None:
        """Read prompts from the terminal until its end. Each prompt is independent of the ones before."""
        with suppress(ImportError):  # not built into every Python
            import readline  # noqa: F401 - arrow keys and history in input()
        print("Each line is a separate prompt; an empty line or Ctrl-D ends.")
        epoch = 0
        while line := _typed():
            try:
                await self._answer(generator, [PromptInput(line, "this prompt")], epoch, show=True, prompt=False)
            except DataError as error:
                print(error)
            epoch += 1

    async def _answer(self, generator: LocalGenerator, questions: Sequence[PromptInput], epoch: int, *, show: bool,
                      prompt: bool = True) -> list[dict[str, Any]]:
        rows = []
        async for answers in generator.generate(questions, self._options.n, epoch):
            scores = (await self._scorer.score(answers)).scores.tolist() if self._scorer else [None] * len(answers)
            for answer, score in zip(answers, scores, strict=True):
                rows.append(_row(answer, score, self._options.seed))
                if show:
                    print_answer(rows[-1], prompt=prompt)
        return rows


def _typed() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return ""


def _row(answer: RewardRequest, score: float | None, seed: int) -> dict[str, Any]:
    row = {
        "prompt": answer.prompt, "response": answer.response, "tokens": int(answer.response_mask.sum()),
        "finish_reason": answer.finish_reason, "sample": answer.key.sample, "seed": sample_seed(seed, answer.key),
    }
    return row if score is None else {**row, "score": score}


ENDINGS = {"stop": "finished", "length": "cut at --max-tokens", "abort": "aborted"}


def print_answer(row: Mapping[str, Any], stream: TextIO | None = None, prompt: bool = True) -> None:
    """Print one answer: coloured on a terminal, plain text elsewhere.

    Args:
        row: prompt, response, tokens, finish_reason and, where there is one, score.
        prompt: print the prompt too.
    """
    stream = stream or sys.stdout
    about = f"{row['tokens']} tokens, {ENDINGS.get(row['finish_reason'], row['finish_reason'])}"
    if row.get("score") is not None:
        about += f", score {row['score']:.4g}"
    asked, answered = escaped(row["prompt"]).strip(), escaped(row["response"]).strip()
    if not is_terminal(stream):
        stream.write((f"prompt: {asked}\n" if prompt else "") + f"response: {answered}\n({about})\n\n")
        stream.flush()
        return
    console = Console(file=stream, highlight=False)
    if prompt:
        console.print(Text(asked, style="dim"))
    console.print(Padding(Text(answered or "(nothing)", style="bold" if answered else "dim"), (0, 0, 0, 2)))
    console.print(Padding(Text(about, style="dim italic"), (0, 0, 1, 2)))
