"""Saved samples for people: in the terminal, and as an HTML page.

What a model wrote may contain anything: control characters are shown by their escapes, and in the page everything is
escaped by the template.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from rlhf_ray.observability.conversation import Exchange, Turn, escaped, exchanges_of, turns_of
from rlhf_ray.observability.html_page import ASSETS, page
from rlhf_ray.observability.sample_choice import Choice, rows_of
from rlhf_ray.observability.tables import counted, number

T = TypeVar("T")

PAGE_TOKENS = 200_000
"""Tokens of responses that a page has at most, unless it has one prompt: some 8 MB."""
SHOWN_CHARACTERS = 1500
"""Characters of a text that the terminal shows."""
SHOWN_TOKENS = 200
"""Tokens of a segment that the terminal shows."""
NAMED_STEPS = 10
"""Of more steps the first and the last are named."""
USES = {"train": "", "mask": " (masked)", "zero": " (zero reward)", "quarantine": " (quarantined)"}
"""What was done with an episode, after its cause."""
STYLES = {"response": "green", "assistant": "green", "call": "cyan", "tool": "magenta"}
"""Colours of those who speak in a conversation; others are dim."""


@dataclass(frozen=True)
class Token:
    """A token of a response, or what an environment put between turns. None: not sampled, or not known."""

    segment: int
    """Number of the sample's row that holds it, from 0."""
    place: int
    """In that row."""
    sampled: bool
    text: str
    logprob: float | None
    """The generator's."""
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
    """Of each segment those from the first on that was sampled."""
    segments: int = 1
    """Its rows."""
    observed: int = 0
    """Tokens that were not sampled and that follow a sampled one in their segment."""
    exchanges: Sequence[Exchange] = ()
    """Turns of an episode; none of a single response, nor has it any of what follows."""
    cause: str = ""
    use: str = ""
    error: str = ""
    environment: str = ""
    metrics: Mapping[str, float] | None = None
    events: Mapping[str, int] | None = None

    @property
    def group(self) -> tuple[int, int, int]:
        """Step, epoch and row: equal for the samples of one prompt."""
        return self.step, *self.key[:2]

    @property
    def name(self) -> str:
        """Its key as text."""
        epoch, row, sample = self.key
        return f"epoch {epoch}, row {row}, sample {sample}"

    @property
    def ended(self) -> str:
        """Why it ended."""
        return self.cause or self.finish_reason


def samples_of(run_dir: Path, choice: Choice | None = None) -> list[Sample]:
    """The chosen samples of a run, by default all of its newest step; errors as `rows_of`."""
    return [sample_of(row) for row in rows_of(run_dir, choice or Choice())]


def sample_of(row: Mapping[str, Any]) -> Sample:
    """A saved sample."""
    sampled = [i for i, is_sampled in enumerate(row["response_mask"]) if is_sampled]
    old, behaviour, advantages = row["old_logprobs"], row["behaviour_logprobs"], row["advantages"]
    known = [] if old is None else [abs(behaviour[i] - old[i]) for i in sampled]
    versions = [row["versions"][i] for i in sampled] or [-1]
    tokens = list(_tokens(row))
    return Sample(
        step=row["step"], key=(row["epoch"], row["row"], row["sample"]), turns=turns_of(row),
        response=escaped(row["response"]), finish_reason=row["finish_reason"], score=_known(row["score"]),
        parts={name.removeprefix("reward/"): value for name, value in row.items()
               if name.startswith("reward/") and _known(value) is not None},
        kl=_known(row["kl"]), gold=_known(row["gold"]),
        advantage=fmean(advantages[i] for i in sampled) if sampled and advantages is not None else None,
        versions=(min(versions), max(versions)), length=len(sampled), gap=fmean(known) if known else None,
        tokens=tokens, segments=len(row["row_lengths"]), observed=sum(not token.sampled for token in tokens),
        exchanges=exchanges_of(row), cause=row.get("cause") or "", use=row.get("use") or "",
        error=escaped(row.get("error") or ""), environment=row.get("environment") or "",
        metrics=dict(row.get("metrics") or ()), events=dict(row.get("events") or ()))


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def _tokens(row: Mapping[str, Any]) -> Iterator[Token]:
    old, behaviour, advantages = row["old_logprobs"], row["behaviour_logprobs"], row["advantages"]
    start = 0
    for segment, length in enumerate(row["row_lengths"]):
        mask = row["response_mask"][start:start + length]
        for place in range(mask.index(True) if True in mask else length, length):
            i = start + place
            text = escaped(row["token_texts"][i])
            if mask[place]:
                yield Token(segment, place, True, text, behaviour[i], None if old is None else behaviour[i] - old[i],
                            None if advantages is None else advantages[i], row["versions"][i])
            else:
                yield Token(segment, place, False, text, None, None, None, None)
        start += length


def extremes(
    samples: Sequence[T], worst: int, best: int, score: Callable[[Any], float | None] = lambda sample: sample.score
) -> list[tuple[str, T]]:
    """The samples of the lowest and of the highest reward, each with a title; none is in both. Those without a reward
    are among them only if no sample has one."""
    scored = [sample for sample in samples if score(sample) is not None]
    ranked = sorted(scored or samples, key=lambda sample: -(score(sample) or 0.0))
    best = min(best, len(ranked))
    worst = min(worst, len(ranked) - best)
    lowest = ranked[len(ranked) - worst:][::-1]
    return [*((f"best {i}", sample) for i, sample in enumerate(ranked[:best], 1)),
            *((f"worst {i}", sample) for i, sample in enumerate(lowest, 1))]


def print_samples(
    console: Console, samples: Sequence[Sample], shown: Iterable[tuple[str, Sample]], full: bool = False,
    tokens: bool = False,
) -> None:
    """Print some of the samples, each with a title, after a line about all of them. A prompt is printed once for
    samples of it that follow each other.

    Args:
        full: do not shorten long texts.
        tokens: print a line for each token, too.
    """
    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    def quote(turn: Turn) -> None:
        style = STYLES.get(turn.role, "dim")
        text = turn.text if full else _shortened(turn.text)
        console.print(Text.assemble((f"{turn.role}: ", style), text), soft_wrap=True)

    say(summary_of(samples), "bold")
    before: Sample | None = None
    for title, sample in shown:
        console.print()
        say(f"{title} · step {sample.step}, {sample.name}", "bold cyan")
        for turn in () if before is not None and before.group == sample.group else sample.turns:
            quote(turn)
        before = sample
        if not sample.cause:
            quote(Turn("response", sample.response))
        for i, exchange in enumerate(sample.exchanges, 1):
            say(f"turn {i}{_words_of(exchange, sample.segments > 1)}", "yellow")
            for turn in exchange.said:
                quote(turn)
        if sample.cause:
            say(outcome_of(sample), "green" if sample.cause == "completed" else "red")
        say(numbers_of(sample), "yellow")
        if tokens:
            _print_tokens(say, sample, full)


def _words_of(exchange: Exchange, several: bool) -> str:
    """The numbers of a turn of an episode, which may have several segments."""
    words = [f"segment {exchange.segment}"] if several else []
    words += [counted(exchange.sampled, "token"), exchange.finish_reason, f"reward {number(exchange.reward)}"]
    return "".join(f" · {word}" for word in words)


def outcome_of(sample: Sample) -> str:
    """How an episode ended, in words."""
    words = [f"{sample.environment}: {sample.cause}{USES.get(sample.use, f' ({sample.use})')}"]
    happened = ((name, count) for name, count in (sample.events or {}).items() if count)
    numbers = [*(sample.metrics or {}).items(), *happened]
    if numbers:
        words.append(", ".join(f"{escaped(name)} {number(value)}" for name, value in numbers))
    return " · ".join(words) + (f"\n{sample.error}" if sample.error else "")


def _print_tokens(say: Callable[[str, str], None], sample: Sample, full: bool) -> None:
    """A line for each token of a sample."""
    for segment, members in groupby(sample.tokens, lambda token: token.segment):
        found = list(members)
        say(f"segment {segment + 1}, after {counted(found[0].place, 'token')} of context:", "bold")
        say(f"{'place':>7}  {'token':<8}  {'log-prob':>9}  {'gap':>9}  {'advantage':>9}  {'version':>7}", "bold")
        left_out = 0 if full else max(0, len(found) - SHOWN_TOKENS)
        half = (len(found) - left_out) // 2
        for i, token in enumerate(found):
            if i == half and left_out:
                say(f"        … {left_out:,} tokens …", "")
            if not half <= i < half + left_out:
                say(_line_of(token), "green" if token.sampled else "dim")


def _line_of(token: Token) -> str:
    text = json.dumps(token.text, ensure_ascii=False)
    if not token.sampled:
        return f"{token.place:>7}  observed{'':>42}  {text}"
    values = (f"{'–' if value is None else f'{value:.4g}':>9}" for value in (token.logprob, token.gap, token.advantage))
    return f"{token.place:>7}  sampled   {'  '.join(values)}  {number(token.version):>7}  {text}"


def summary_of(samples: Sequence[Sample]) -> str:
    """How many samples there are, of which steps and prompts, their rewards, and the causes of episodes' ends."""
    steps = sorted({sample.step for sample in samples})
    numbers = ", ".join(map(str, steps)) if len(steps) <= NAMED_STEPS else f"{steps[0]} to {steps[-1]}"
    words = [f"{'Step' if len(steps) == 1 else 'Steps'} {numbers}",
             f"{counted(len(samples), 'sample')} of {counted(len({sample.group for sample in samples}), 'prompt')}"]
    scores = [sample.score for sample in samples if sample.score is not None]
    if scores:
        words.append(f"reward {number(fmean(scores))} (from {number(min(scores))} to {number(max(scores))})")
    causes = Counter(sample.cause for sample in samples if sample.cause)
    if causes:
        words.append(", ".join(f"{cause} {count}" for cause, count in causes.most_common()))
    return " · ".join(words)


def numbers_of(sample: Sample) -> str:
    """A sample's numbers in a line."""
    parts = ", ".join(f"{name} {number(value)}" for name, value in sample.parts.items())
    oldest, newest = sample.versions
    words = [f"reward {number(sample.score)}{f' ({parts})' if parts else ''}"]
    if sample.advantage is not None:
        words.append(f"advantage {number(sample.advantage)}")
    if sample.kl is not None:
        words.append(f"KL {number(sample.kl)}")
    if sample.gold is not None:
        words.append(f"judge {number(sample.gold)}")
    if sample.gap is not None:
        words.append(f"gap {number(sample.gap)}")
    if sample.cause:
        words += [counted(len(sample.exchanges), "turn"),
                  f"{counted(sample.length, 'token')} sampled, {sample.observed} observed"]
        words += [f"{sample.segments} segments"] if sample.segments > 1 else []
    else:
        words += [counted(sample.length, "token"), sample.finish_reason or "–"]
    return " · ".join([*words, f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"])


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
    reasons = sorted({sample.ended for group in shown for sample in group if sample.ended})
    return page(ASSETS / "samples.html", kind="Samples", title=run_dir.resolve().name,
                lead=summary_of(samples) + ".", facts={}, notes=notes, groups=shown, reasons=reasons,
                steps=sorted({group[0] for group in chosen}), numbers=numbers_of, strips=strips, outcome=outcome_of,
                words_of=_words_of)


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
    places of its texts, gaps, advantages, versions, log-probabilities, and the first token of each segment."""
    texts = list(dict.fromkeys(token.text for sample in samples for token in sample.tokens))
    places = {text: i for i, text in enumerate(texts)}
    strips = [[[places[token.text] for token in sample.tokens], [_rounded(token.gap) for token in sample.tokens],
               [_rounded(token.advantage) for token in sample.tokens], [token.version for token in sample.tokens],
               [_rounded(token.logprob) for token in sample.tokens],
               [i for i, token in enumerate(sample.tokens) if not i or token.segment != sample.tokens[i - 1].segment]]
              for sample in samples]
    return json.dumps([texts, strips], separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
