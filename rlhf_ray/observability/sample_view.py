"""Saved samples for people: which of a run's samples to show, in the terminal and as an HTML page.

What a model wrote may contain anything: control characters are shown by their escapes, and in the page everything is
escaped by the template.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.text import Text

from rlhf_ray.errors import DataError
from rlhf_ray.observability.conversation import Turn, escaped, turns_of
from rlhf_ray.observability.html_page import ASSETS, page
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.observability.sample_files import SHOWN, read_samples, steps_with_samples
from rlhf_ray.observability.tables import number

PAGE_TOKENS = 200_000
"""Tokens of responses that a page has at most, unless it has one prompt: some 8 MB."""
SHOWN_CHARACTERS = 1500
"""Characters of a text that the terminal shows."""
STEPS_SEARCHED = 5
"""Newest steps with a prompt that are shown."""


@dataclass(frozen=True)
class Token:
    """A token of a response. None: not sampled, or not known."""

    text: str
    gap: float | None
    """The generator's log-probability minus the learner's, where a learner computed it."""
    advantage: float | None
    version: int | None


@dataclass(frozen=True)
class Sample:
    """One saved sample."""

    step: int
    key: tuple[int, int, int]
    """(epoch, row, sample)."""
    turns: Sequence[Turn]
    response: str
    finish_reason: str
    score: float | None
    parts: Mapping[str, float]
    """Components of the reward by name, before their weights."""
    kl: float | None
    gold: float | None
    advantage: float | None
    """Mean over the tokens that the policy sampled."""
    versions: tuple[int, int]
    """Oldest and newest weight version of a token."""
    length: int
    """Tokens that the policy sampled."""
    gap: float | None
    """Mean absolute log-probability gap of these tokens."""
    tokens: Sequence[Token]
    """From the first token that was sampled on."""

    @property
    def group(self) -> tuple[int, int, int]:
        """Step, epoch and row: equal for the samples of one prompt."""
        return self.step, *self.key[:2]

    @property
    def name(self) -> str:
        """Its key as text."""
        epoch, row, sample = self.key
        return f"epoch {epoch}, row {row}, sample {sample}"


def samples_of(run_dir: Path, step: int | None = None, prompt: str | None = None) -> list[Sample]:
    """Samples of a run's step, or of its newest one, in the order of the batch. A run may be writing more.

    Args:
        prompt: of prompts only that contain this text, in upper or lower case; without `step`, of the newest
            `STEPS_SEARCHED` steps that have such prompts.

    Raises:
        DataError: there are none; says why.
    """
    run = RunDirectory(run_dir)
    steps = steps_with_samples(run.samples)
    if not steps:
        raise DataError(f"{run.path} has no samples: no step is finished yet, the run was started with "
                        "logging.samples=off, or the stage generates none")
    if step is not None and step not in steps:
        raise DataError(f"{run.samples} has no samples of step {step}; it has those of "
                        f"{len(steps)} steps from {steps[0]} to {steps[-1]}")
    wanted = [step] if step is not None else steps[-1:]
    if prompt is not None:
        searched = wanted if step is not None else steps[::-1]
        wanted = []
        for each in searched:
            rows = read_samples(run.samples, each, SHOWN)
            if len(wanted) < STEPS_SEARCHED and any(_asks(row, prompt) for row in rows):
                wanted.insert(0, each)
        if not wanted:
            raise DataError(f"no prompt of {'step ' + str(step) if step is not None else str(len(steps)) + ' steps'} "
                            f"in {run.samples} contains {prompt!r}")
    found = [row for each in wanted for row in read_samples(run.samples, each) if not prompt or _asks(row, prompt)]
    return [_sample(row) for row in found]


def _asks(row: Mapping[str, Any], prompt: str) -> bool:
    return any(prompt.casefold() in turn.text.casefold() for turn in turns_of(row))


def _sample(row: Mapping[str, Any]) -> Sample:
    sampled = [i for i, is_sampled in enumerate(row["response_mask"]) if is_sampled]
    old, behaviour, advantages = row["old_logprobs"], row["behaviour_logprobs"], row["advantages"]
    gaps = [None if old is None else behaviour[i] - old[i] for i in sampled]
    known = [abs(gap) for gap in gaps if gap is not None]
    tokens = []
    for i in range(sampled[0] if sampled else len(row["token_ids"]), len(row["token_ids"])):
        text = escaped(row["token_texts"][i])
        if row["response_mask"][i]:
            tokens.append(Token(text, None if old is None else behaviour[i] - old[i], advantages[i],
                                row["versions"][i]))
        else:
            tokens.append(Token(text, None, None, None))
    versions = [row["versions"][i] for i in sampled] or [-1]
    return Sample(
        step=row["step"], key=(row["epoch"], row["row"], row["sample"]), turns=turns_of(row),
        response=escaped(row["response"]), finish_reason=row["finish_reason"], score=row["score"],
        parts={name.removeprefix("reward/"): value for name, value in row.items()
               if name.startswith("reward/") and value is not None},
        kl=row["kl"], gold=row["gold"], advantage=fmean(advantages[i] for i in sampled) if sampled else None,
        versions=(min(versions), max(versions)), length=len(sampled), gap=fmean(known) if known else None,
        tokens=tokens)


def extremes(samples: Sequence[Sample], worst: int, best: int) -> list[tuple[str, Sample]]:
    """The samples of the lowest and of the highest reward, each with a title; none is in both."""
    ranked = sorted(samples, key=lambda sample: -(sample.score or 0.0))
    best = min(best, len(ranked))
    worst = min(worst, len(ranked) - best)
    lowest = ranked[len(ranked) - worst:][::-1]
    return [*((f"best {i}", sample) for i, sample in enumerate(ranked[:best], 1)),
            *((f"worst {i}", sample) for i, sample in enumerate(lowest, 1))]


def print_samples(console: Console, samples: Sequence[Sample], shown: Iterable[tuple[str, Sample]]) -> None:
    """Print some of the samples, each with a title, after a line about all of them. A prompt is printed once for
    samples of it that follow each other."""
    console.print(Text(summary_of(samples), style="bold"))
    before: Sample | None = None
    for title, sample in shown:
        console.print()
        console.print(Text(f"{title} · step {sample.step}, {sample.name}", style="bold cyan"))
        turns = () if before is not None and before.group == sample.group else sample.turns
        before = sample
        for turn in (*turns, Turn("response", sample.response)):
            style = "green" if turn.role == "response" else "dim"
            console.print(Text.assemble((f"{turn.role}: ", style), _shortened(turn.text)), soft_wrap=True)
        console.print(Text(numbers_of(sample)), style="yellow", soft_wrap=True)


def summary_of(samples: Sequence[Sample]) -> str:
    """How many samples there are, of which steps and prompts, and their rewards."""
    steps = sorted({sample.step for sample in samples})
    prompts = len({sample.group for sample in samples})
    scores = [sample.score for sample in samples if sample.score is not None]
    rewards = f" · reward {number(fmean(scores))} (from {number(min(scores))} to {number(max(scores))})"
    return (f"{'Step' if len(steps) == 1 else 'Steps'} {', '.join(map(str, steps))} · {len(samples)} samples of "
            f"{prompts} prompt{'' if prompts == 1 else 's'}{rewards if scores else ''}")


def numbers_of(sample: Sample) -> str:
    """A sample's numbers in a line."""
    parts = ", ".join(f"{name} {number(value)}" for name, value in sample.parts.items())
    oldest, newest = sample.versions
    words = [f"reward {number(sample.score)}{f' ({parts})' if parts else ''}", f"advantage {number(sample.advantage)}"]
    if sample.kl is not None:
        words.append(f"KL {number(sample.kl)}")
    if sample.gold is not None:
        words.append(f"judge {number(sample.gold)}")
    if sample.gap is not None:
        words.append(f"gap {number(sample.gap)}")
    return " · ".join([*words, f"{sample.length} tokens", sample.finish_reason or "–",
                       f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"])


def _shortened(text: str) -> str:
    if len(text) <= SHOWN_CHARACTERS:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"


def sample_page(run_dir: Path, samples: Sequence[Sample]) -> str:
    """One self-contained HTML document; of many samples those of some prompts, and a note that says so."""
    groups: dict[tuple[int, int, int], list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    chosen = _within_budget(groups)
    notes = [] if len(chosen) == len(groups) else [
        f"The page has {len(chosen)} of {len(groups)} prompts, those with the lowest and the highest rewards among "
        "them; `rlhf-ray samples` finds others with --prompt and --step."]
    shown = [[replace(sample, tokens=()) for sample in groups[group]] for group in chosen]
    strips = _strips([sample for group in chosen for sample in groups[group]])
    reasons = sorted({sample.finish_reason for group in shown for sample in group if sample.finish_reason})
    return page(ASSETS / "samples.html", kind="Samples", title=run_dir.resolve().name,
                lead=summary_of(samples) + ".", facts={}, notes=notes, groups=shown, reasons=reasons,
                steps=sorted({group[0] for group in chosen}), numbers=numbers_of, strips=strips)


def _within_budget(groups: Mapping[tuple[int, int, int], Sequence[Sample]]) -> list[tuple[int, int, int]]:
    """The groups of a page in their order: first those with the extreme rewards, until the page is full."""
    def extreme(group: tuple[int, int, int]) -> float:
        scores = [sample.score or 0.0 for sample in groups[group]]
        return max(max(scores) - middle, middle - min(scores))

    middle = fmean(sample.score or 0.0 for group in groups.values() for sample in group)
    left = PAGE_TOKENS
    chosen: set[tuple[int, int, int]] = set()
    for group in sorted(groups, key=extreme, reverse=True):
        left -= sum(len(sample.tokens) for sample in groups[group])
        if left < 0 and chosen:
            break
        chosen.add(group)
    return [group for group in groups if group in chosen]


def _strips(samples: Sequence[Sample]) -> str:
    """The tokens of all samples as JSON that cannot end its script element: texts, each once, and for each sample the
    places of its texts, gaps, advantages and versions."""
    texts = list(dict.fromkeys(token.text for sample in samples for token in sample.tokens))
    places = {text: i for i, text in enumerate(texts)}
    strips = [[[places[token.text] for token in sample.tokens], [_rounded(token.gap) for token in sample.tokens],
               [_rounded(token.advantage) for token in sample.tokens], [token.version for token in sample.tokens]]
              for sample in samples]
    return json.dumps([texts, strips], separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
