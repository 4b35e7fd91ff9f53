"""Outcomes as a table for people (Markdown) and as a file for programs (JSON)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.estimators.outcome import TARGET, WINDOW, Outcome, Spread, spread

HEADINGS = ("estimator", "seeds", "gold before", "gold after", "KL after", f"samples to gold {TARGET:g}", "seconds",
            "distinct", "distinct pairs", "learned")

Outcomes = Mapping[str, Sequence[Outcome]]
"""Estimator -> its outcomes, one a seed."""


def markdown(outcomes: Outcomes) -> str:
    """A row an estimator: means over seeds ± sample deviation."""
    lines = [f"| {' | '.join(HEADINGS)} |", f"|---{'|---:' * (len(HEADINGS) - 1)}|"]
    lines += [f"| {' | '.join(row(name, of))} |" for name, of in outcomes.items() if of]
    return "\n".join(lines) + "\n"


def row(name: str, outcomes: Sequence[Outcome]) -> list[str]:
    """The cells of one estimator."""
    return [
        f"`{name}`", " ".join(str(o.seed) for o in outcomes),
        shown(spread(outcomes, lambda o: o.gold_before), 3), shown(spread(outcomes, lambda o: o.gold_after), 3),
        shown(spread(outcomes, lambda o: o.kl_after), 2), samples_cell(outcomes),
        shown(spread(outcomes, lambda o: o.seconds), 0), shown(spread(outcomes, lambda o: o.distinct), 2),
        shown(spread(outcomes, lambda o: o.distinct_bigrams), 3),
        f"{sum(o.learned for o in outcomes)}/{len(outcomes)}",
    ]


def samples_cell(outcomes: Sequence[Outcome]) -> str:
    """Mean samples of the seeds that reached the target, and how many did where not all."""
    reached = [n for o in outcomes if (n := o.samples_to_target) is not None]
    if not reached:
        return "not reached"
    some = "" if len(reached) == len(outcomes) else f" ({len(reached)} of {len(outcomes)})"
    return f"{sum(reached) / len(reached):,.0f}{some}"


def shown(value: Spread, digits: int) -> str:
    """A mean, and its deviation where there is one."""
    deviation = f" ± {value.deviation:.{digits}f}" if value.deviation else ""
    return f"{value.mean:.{digits}f}{deviation}"


def write_tables(outcomes: Outcomes, machine: Mapping[str, Any], directory: Path) -> tuple[Path, Path]:
    """Write estimators.md and estimators.json (every outcome with its curves, and the machine); returns their paths."""
    page, data = directory / "estimators.md", directory / "estimators.json"
    note = (f"Means over seeds ± sample deviation; gold, KL and shares on 512 held-out prompts. Samples to gold "
            f"{TARGET:g}: until the mean of {WINDOW} batches reached it.\n")
    page.write_text(f"{markdown(outcomes)}\n{note}", encoding="utf-8")
    data.write_text(json.dumps({
        "machine": dict(machine),
        "outcomes": [{**asdict(o), "samples_to_target": o.samples_to_target, "learned": o.learned}
                     for of in outcomes.values() for o in of],
    }, indent=1) + "\n", encoding="utf-8")
    return page, data
