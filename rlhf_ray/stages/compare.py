"""`rlhf-ray compare`: two models answer the same prompts with the same seeds, and a scorer says who wins."""

import asyncio
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_ray.algorithms.win_rate import outcome, outcome_or_failed, win_rate
from rlhf_ray.config.environment_names import named_environments
from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.tokenizer import tokenizer_digest
from rlhf_ray.errors import ConfigError
from rlhf_ray.files.writing import write_atomically
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.observability.conversation import in_lines, response_of, turns_of
from rlhf_ray.observability.model_comparison import Comparison, Pair, comparison_page, print_comparison
from rlhf_ray.observability.run_directory import finite
from rlhf_ray.rewards.protocol import RewardRequest
from rlhf_ray.roles.local_episodes import episode_means
from rlhf_ray.roles.local_generator import LocalGenerator
from rlhf_ray.roles.prompt_input import PromptInput, read_prompt_inputs
from rlhf_ray.stages.generate import model_of, played, refuse_without_effect
from rlhf_ray.stages.resolve_model import check_output
from rlhf_ray.stages.scorers import check_answers, check_scorer, errors_name_option, scorer_of

SEQUENCES = 64
"""Largest number of answers generated at the same time."""
SCORED_AT_ONCE = 64
"""Answers per call of the scorer."""


@dataclass(frozen=True)
class CompareOptions:
    """Options of the command line."""

    first: str
    second: str
    prompts: str
    """File or Hub data set."""
    scorer: str | None
    """As in `scorers.scorer_of`; None with an environment."""
    output: Path
    """The page to write; the numbers are written beside it, as .json."""
    sampling: SamplingConfig
    column: str = "prompt"
    limit: int | None = None
    n: int = 1
    """Pairs of answers for each prompt."""
    seed: int = 0
    tie: float = 0.0
    """Largest difference of scores that counts as a tie."""
    chat: bool = True
    environment: str | None = None
    """Whose rewards decide, as in `config.environment_names`; None with a scorer."""
    max_turns: int | None = None
    """Of an episode; None: the environment's."""


def run(options: CompareOptions) -> Comparison:
    """Compare, print the verdict, and write the page and the numbers. One model is in memory at a time.

    Raises:
        RLHFError: the command failed; the message says what to do.
    """
    _refuse_contradictions(options)
    check_output(options.output)
    numbers = options.output.with_suffix(".json")
    if numbers == options.output:
        raise ConfigError(f"--output {options.output} is the file of the numbers; name the page, e.g. "
                          f"{options.output.with_suffix('.html')}")
    environments = named_environments(options.environment, options.max_turns) if options.environment else {}
    models = [model_of(name, which, options.sampling) for name, which in ((options.first, "A"), (options.second, "B"))]
    questions = read_prompt_inputs(options.prompts, options.column, options.limit)
    if options.scorer is None:
        comparison = asyncio.run(_compare_episodes(options, environments, models, questions))
    else:
        check_scorer(options.scorer, models[0], "--scorer")
        check_answers(options.scorer, questions, models[0], "--scorer")
        comparison = asyncio.run(_compare(options, options.scorer, models, questions))
    write_atomically(numbers, (json.dumps(finite(comparison.summary()), indent=1, ensure_ascii=False) + "\n").encode())
    write_atomically(options.output, comparison_page(comparison).encode())
    print_comparison(comparison)
    print(f"page: {options.output}\nnumbers: {numbers}")
    return comparison


def _refuse_contradictions(options: CompareOptions) -> None:
    if (options.scorer is None) == (options.environment is None):
        given = "both are" if options.scorer else "neither is"
        raise ConfigError("models are compared by --scorer, which judges responses, or by --environment, whose rewards "
                          f"judge episodes, and {given} given; give one of them")
    refuse_without_effect(options.environment, options.max_turns, options.chat)
    if options.n > 1 and options.sampling.temperature == 0:
        raise ConfigError(f"--temperature 0 gives the same pair {options.n} times; omit --n, or raise the temperature")


async def _compare_episodes(
    options: CompareOptions, environments: Mapping[str, EnvironmentConfig], models: Sequence[ModelConfig],
    questions: Sequence[PromptInput],
) -> Comparison:
    """The comparison by the rewards of episodes on the same rows, with the same seeds. One that failed has no reward:
    it loses against one that has, and is in no mean."""
    sides = []
    for model in models:
        print(f"{model.path}: playing {len(questions) * options.n} episodes", file=sys.stderr)
        sides.append(await played(model, environments, options.sampling, options.seed, questions, options.n))
    scores = [[math.nan if row["score"] is None else row["score"] for row in side] for side in sides]
    pairs = [
        Pair(prompt=in_lines(turns_of(a)), responses=(in_lines(response_of(a)), in_lines(response_of(b))),
             scores=(x, y), tokens=(sum(a["response_mask"]), sum(b["response_mask"])),
             outcome=outcome_or_failed(x, y, options.tie))
        for a, b, x, y in zip(*sides, *scores, strict=True)
    ]
    first, second = map(episode_means, sides)
    numbers = {name: (first[name], second[name]) for name in ("solved", "turns", "failed")}
    return _comparison(options, f"environment {options.environment}", len(questions), pairs, numbers)


async def _compare(
    options: CompareOptions, scorer: str, models: Sequence[ModelConfig], questions: Sequence[PromptInput]
) -> Comparison:
    answers = [await _answers(options, model, questions) for model in models]
    scores = await _scores(scorer, models, answers)
    pairs = [
        Pair(prompt=_prompt_text(question), responses=(a.response, b.response), scores=(x, y),
             tokens=(int(a.response_mask.sum()), int(b.response_mask.sum())), outcome=outcome(x, y, options.tie))
        for question, a, b, x, y in zip(_repeated(questions, options.n), *answers, *scores, strict=True)
    ]
    return _comparison(options, scorer, len(questions), pairs, {})


def _comparison(options: CompareOptions, by: str, prompts: int, pairs: Sequence[Pair],
                numbers: Mapping[str, tuple[float, float]]) -> Comparison:
    outcomes = [[pair.outcome for pair in pairs[i : i + options.n]] for i in range(0, len(pairs), options.n)]
    return Comparison(
        names=(options.first, options.second), scorer=by, prompts=prompts, pairs=pairs, numbers=numbers,
        rate=win_rate(outcomes), facts={
            "From": options.prompts, "Answers to a prompt": str(options.n), "Seed": str(options.seed),
            "Sampling": _sampling_text(options.sampling),
            "Tie": f"up to {options.tie:g} apart",
        })


async def _answers(
    options: CompareOptions, model: ModelConfig, questions: Sequence[PromptInput]
) -> list[RewardRequest]:
    """All answers of one model, which is unloaded afterwards."""
    print(f"{model.path}: answering {len(questions)} prompts", file=sys.stderr)
    generator = LocalGenerator(model, options.sampling, options.seed, options.chat,
                               min(SEQUENCES, len(questions) * options.n))
    await generator.start(questions)
    try:
        return [answer async for some in generator.generate(questions, options.n) for answer in some]
    finally:
        await generator.stop()


async def _scores(
    scorer: str, models: Sequence[ModelConfig], answers: Sequence[list[RewardRequest]]
) -> list[list[float]]:
    """Scores of both sides. A scorer reads token ids by the model's tokenizer, so two tokenizers need two scorers, one
    after the other."""
    print(f"scoring by {scorer}", file=sys.stderr)
    same = len({tokenizer_digest(load_tokenizer(model)) for model in models}) == 1
    if same:
        both = await _scored(scorer, models[0], [answer for side in answers for answer in side])
        return [both[: len(answers[0])], both[len(answers[0]) :]]
    return [await _scored(scorer, model, side) for model, side in zip(models, answers, strict=True)]


async def _scored(name: str, model: ModelConfig, answers: list[RewardRequest]) -> list[float]:
    scorer = scorer_of(name, model)
    with errors_name_option(name, "--scorer"):
        try:
            await scorer.start()
            parts = [answers[i : i + SCORED_AT_ONCE] for i in range(0, len(answers), SCORED_AT_ONCE)]
            return [score for part in parts for score in (await scorer.score(part)).scores.tolist()]
        finally:
            await scorer.stop()


def _sampling_text(sampling: SamplingConfig) -> str:
    """Temperature, truncation and length, and whatever else was set."""
    always = f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}, top-k {sampling.top_k}"
    penalty = sampling.repetition_penalty if sampling.repetition_penalty != 1 else None
    others = {"min-p": sampling.min_p, "repetition penalty": penalty, "min tokens": sampling.min_tokens,
              "stop": sampling.stop, "stop token ids": sampling.stop_token_ids}
    given = [f"{name} {value}" for name, value in others.items() if value]
    return ", ".join([always, *given, f"{sampling.max_tokens} tokens"])


def _repeated(questions: Sequence[PromptInput], n: int) -> list[PromptInput]:
    return [question for question in questions for _ in range(n)]


def _prompt_text(question: PromptInput) -> str:
    """The prompt as given: a text, or its messages as a script."""
    if isinstance(question.content, str):
        return question.content
    return "\n".join(f"{m['role']}: {m.get('content') or ''}" for m in question.content)
