"""One self-contained HTML page from a run's directory: the run's settings, its results, and its course."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rlhf_ray.config.algorithm import method_in_words
from rlhf_ray.config.rewards import rewards_in_words
from rlhf_ray.errors import DataError
from rlhf_ray.files.writing import write_atomically
from rlhf_ray.observability.bottleneck import diagnosis
from rlhf_ray.observability.conversation import escaped, response_of, turns_of
from rlhf_ray.observability.faults import in_one_line, read_faults
from rlhf_ray.observability.html_page import ASSETS, Tile, page
from rlhf_ray.observability.metrics import metric_rows
from rlhf_ray.observability.owner_record import Term
from rlhf_ray.observability.progress import duration
from rlhf_ray.observability.report_charts import Rows, charts_of, series
from rlhf_ray.observability.report_profile import profiles
from rlhf_ray.observability.row_means import ROWS, mean_rate, thinned
from rlhf_ray.observability.run_directory import RunDirectory, read_json
from rlhf_ray.observability.sample_files import some_samples
from rlhf_ray.observability.still_policy import still_policy
from rlhf_ray.observability.tables import changes, workers_text

KINDS = {"reward_model": "Reward model", "sft": "Supervised fine-tuning", "process_reward": "Process reward model",
         "pairs": "Preference pairs"}
"""Stage by the prefix of its metrics; a run whose policy is trained by rewards says how."""

FACTS = {
    "Model": ("model", "path"),
    "Prompts": ("prompts", "path"),
    "Data": ("data", "path"),
    "Judge": ("logging", "judge"),
    "Prompts per step": ("coordinator", "prompts_per_step"),
    "Samples per prompt": ("coordinator", "samples_per_prompt"),
    "Rows per step": ("training", "batch_size"),
    "Staleness allowed": ("coordinator", "max_staleness"),
    "Generators": ("generator", "workers"),
    "Seed": ("run", "seed"),
}
"""Lines at the top of the page, by their field in the configuration."""

TILES = {
    "reward/mean": "Reward",
    "reward/gold": "Independent judge",
    "kl/sequence": "KL from the reference",
    "dynamic/drawn_per_kept": "Prompts drawn for one kept",
    "sft/loss": "Training loss",
    "reward_model/accuracy": "Training accuracy",
    "process_reward/accuracy": "Training accuracy",
    "eval/accuracy": "Held-out accuracy",
    "eval/loss": "Held-out loss",
    "throughput/samples_per_second": "Samples per second",
    "throughput/tokens_per_second": "Tokens per second",
}
MAX_TILES = 5


def write_report(run_dir: Path, term: Term | None = None) -> Path:
    """Write report.html from those of config.yaml, metrics.jsonl, samples/, evaluation.json, summary.json that exist.

    Args:
        term: ownership term of the run's directory; other processes may write a report without one.

    Raises:
        DataError: the directory holds neither metrics nor a configuration, or one of the files is damaged.
    """
    run = RunDirectory(run_dir)
    rows = thinned(metric_rows(run.path))
    if not rows and not run.config.exists():
        raise DataError(f"{run.path} holds no run: it has neither {run.metrics.name} nor {run.config.name}; name a "
                        "stage's run.dir")
    config_text = run.config.read_text(errors="replace") if run.config.exists() else ""
    config, evaluation, summary = saved_values(run), read_json(run.evaluation), read_json(run.summary)
    charts = sorted(charts_of(rows), key=lambda c: ("Learning", "Optimisation", "System").index(c.section))
    text = page(
        ASSETS / "report.html", charts, kind=kind_of_run(rows, config), title=run.path.resolve().name,
        lead=lead_of_run(rows, summary), facts=_facts(config), tiles=_tiles(rows),
        notes=(*_endings(summary), *_losses(run), *_stillness(rows), *_speed(rows, config)),
        changes=changes(_numbers(evaluation.get("before")), _numbers(evaluation.get("after"))),
        texts=evaluation.get("texts", ()), profiles=profiles(run), rollouts=some_samples(run.samples), turns=turns_of,
        response=response_of, escaped=escaped,
        workers=workers_text(run.status), config=config_text,
        summary=json.dumps(summary, indent=2, ensure_ascii=False) if summary else "")
    write_atomically(run.report, text.encode(), term)
    return run.report


def _endings(summary: Mapping[str, Any]) -> list[str]:
    """How the run ended, and which step was the best."""
    sentences = [f"Stopped early: {summary['stopped_early']}."] if "stopped_early" in summary else []
    if left_out := (summary.get("ledger") or {}).get("quarantined"):
        sentences.append(f"{left_out} samples were left out, because no score was found for them or for another "
                         "sample of their prompt: quarantine.jsonl lists them.")
    if "prompts_used" in summary:
        sentences.append(f"Ended after {summary['steps']} steps: dynamic sampling had drawn all prompts of run.epochs.")
    if filtered := (summary.get("ledger") or {}).get("filtered"):
        sentences.append(f"Dynamic sampling left {filtered} samples out: all samples of their prompts had the same "
                         "score.")
    if "best_step" in summary:
        step, value = summary["best_step"], f"{summary['best_metric']} {summary['best_value']:.4g}"
        sentences.append(f"Best held-out {value} at step {step}; that model is in best/." if step else
                    f"Best held-out {value} before the first step; no step improved on it.")
    return sentences


def _losses(run: RunDirectory) -> list[str]:
    """Workers that were lost, and the whole run, if it was restarted automatically."""
    lost = in_one_line(read_faults(run.faults))
    return [f"Lost on the way: {lost}. faults.jsonl lists them."] if lost else []


def _stillness(rows: Rows) -> list[str]:
    """Whether the policy has hardly moved."""
    found = still_policy(rows)
    return [_sentence(found)] if found else []


def _speed(rows: Rows, config: Mapping[str, Any]) -> list[str]:
    """Which role was the bottleneck, and how to make the run faster."""
    steps = [row for row in rows if any(name.startswith("share/") for name in row)]
    loop = config.get("coordinator")
    if not steps:
        return []
    cause = diagnosis(steps, loop.get("max_staleness", 0) if isinstance(loop, Mapping) else 0)
    return [f"{_sentence(cause.limit)} {_sentence(cause.advice)}"]


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def saved_values(run: RunDirectory) -> dict[str, Any]:
    """The values of a run's saved configuration; {} without the file.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return dict(yaml.safe_load(run.config.read_text())) if run.config.exists() else {}
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise DataError(f"{run.config} cannot be read: {error}; fix or remove it") from error


def _numbers(side: Any) -> dict[str, float]:
    """One side of an evaluation, numbers only."""
    return {name: value for name, value in (side or {}).items() if isinstance(value, (int, float))}


def kind_of_run(rows: Rows, config: Mapping[str, Any]) -> str:
    """What a run does, from its rows and its configuration: "GRPO", "Reward model"."""
    prefixes = {name.split("/")[0] for row in rows for name in row} or set(config)
    if "policy" in prefixes or "rewards" in config:
        return method_in_words(config)
    return next((kind for prefix, kind in KINDS.items() if prefix in prefixes), "Run")


def lead_of_run(rows: Rows, summary: Mapping[str, Any]) -> str:
    """The length of the run: steps, and the time between its first and last rows; for a stage without steps, its
    results."""
    if not rows:
        return in_a_sentence(summary) if summary else "No step has been finished yet."
    steps = max(row["step"] for row in rows)
    seconds = sum(row["time/step"] * row.get(ROWS, 1) for row in rows if row.get("time/step")) or (
        rows[-1].get("time", 0) - rows[0].get("time", 0))
    return f"{steps:,} step{'' if steps == 1 else 's'} in {duration(seconds)}."


def in_a_sentence(summary: Mapping[str, Any]) -> str:
    """The summary of a stage without steps: "Finished in 1 min 43 s: pairs 5177, left out 823."."""
    counts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in summary.items() if isinstance(value, int))
    return f"Finished in {duration(summary.get('seconds', 0))}{f': {counts}' if counts else ''}."


def _facts(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for label, (section, key) in FACTS.items():
        value = config.get(section)
        value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            found[label] = str(value)
    if isinstance(rewards := config.get("rewards"), Mapping):
        found["Rewards"] = rewards_in_words(rewards)
    return found


def _tiles(rows: Rows) -> list[Tile]:
    """The first metrics of TILES that the run has: the last step against the first; throughput as a mean."""
    found = [(name, label, series(rows, name)[1]) for name, label in TILES.items()]
    tiles = []
    for name, label, values in [f for f in found if f[2]][:MAX_TILES]:
        if name.startswith("throughput/"):
            tiles.append(Tile(label, _short(mean_rate(rows, name) or sum(values) / len(values)), "mean of all steps"))
        else:
            tiles.append(Tile(label, _short(values[-1]), f"first {_short(values[0])}" if len(values) > 1 else ""))
    return tiles


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
