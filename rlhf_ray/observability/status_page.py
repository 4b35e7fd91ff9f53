"""The status of a run in a terminal: its progress, what it learns, what each role waits for, and what to change first;
and a table of several runs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhf_ray.errors import DataError
from rlhf_ray.observability.bottleneck import BUSY, COORDINATOR, diagnosis, mean_shares
from rlhf_ray.observability.control_files import SILENT_S
from rlhf_ray.observability.conversation import escaped, in_lines, response_of, turns_of
from rlhf_ray.observability.faults import in_one_line, read_faults
from rlhf_ray.observability.metric_catalogue import readable
from rlhf_ray.observability.metrics import metric_rows, metric_rows_from_end
from rlhf_ray.observability.owner_record import ProcessIdentity, Record, day_and_time, read_owner
from rlhf_ray.observability.progress import duration
from rlhf_ray.observability.report import in_a_sentence, kind_of_run, saved_values
from rlhf_ray.observability.row_means import mean_rate
from rlhf_ray.observability.run_directory import RunDirectory, read_json
from rlhf_ray.observability.sample_files import some_samples
from rlhf_ray.observability.still_policy import still_policy
from rlhf_ray.observability.tables import number, plain_table, workers_table

RECENT_STEPS = 20
"""Number of steps over which shares of time are averaged."""
RECENT_ROWS = 10 * RECENT_STEPS
"""Rows of metrics that are read from either end: those of steps, and of the evaluations between them."""
LEARNING = {
    "reward/mean": "reward", "reward/gold": "independent judge", "kl/sequence": "KL from the reference",
    "response/length": "response length", "dynamic/drawn_per_kept": "prompts drawn for one kept",
    "sft/loss": "loss", "reward_model/loss": "loss", "reward_model/accuracy": "accuracy",
    "process_reward/loss": "loss", "process_reward/accuracy": "accuracy",
    "eval/reward": "held-out reward", "eval/gold": "held-out independent judge", "eval/kl": "held-out KL",
    "eval/length": "held-out response length", "eval/loss": "held-out loss", "eval/accuracy": "held-out accuracy",
}
"""Metrics that show whether a run learns, in the order in which they are shown."""
TEXT_LINES, TEXT_CHARACTERS = 4, 400
"""At most so much of a prompt and of a response is shown."""
GONE = "is gone (--resume continues the run)"
FINISHED, STOPPED_EARLY = "finished", "stopped early"
"""Ends of a run after which it does not go on."""
SMALLEST = 0.005
"""Shares below this are not shown."""


class Standing(NamedTuple):
    """How far a run is, and whether it goes on."""

    progress: str
    """"step 2 of 10"."""
    state: str
    """"running", "finished", ...; "" if nothing is known."""
    calm: bool = True
    """Whether that is as it should be."""

    def __str__(self) -> str:
        return self.progress + (", " if self.calm else "; ") * bool(self.state) + self.state


def status_page(path: Path, workers: bool = False) -> RenderableType:
    """The run in `path` as a rich renderable: first what it learns, then what each role does. A directory that holds
    several runs and is none itself is shown as a table of them.

    Args:
        workers: also show calls under way, leases, and the process of each worker.

    Raises:
        DataError: the directory holds no run, or its files are damaged.
    """
    run = RunDirectory(path)
    rows = list(islice(metric_rows_from_end(path), RECENT_ROWS))[::-1]
    live, summary, owner = read_json(run.status), read_json(run.summary), read_owner(path)
    if not rows and not live and summary:
        return Text(f"{path}: {in_a_sentence(summary)}")
    if not rows and not live and (owner is None or owner.ended):
        if runs := runs_below(path):
            return runs_table(path, runs)
        below = ", ".join(sorted(str(file.parent) for file in path.glob(f"*/{run.config.name}")))
        raise DataError(f"{path} holds no started run: it has neither {run.metrics.name} nor {run.status.name}, and no "
                        "driver owns it; name the directory that a stage writes (its run.dir)"
                        + (f", such as {below}" if below else ""))
    steps = [row for row in rows if "time/step" in row][-RECENT_STEPS:]
    shares = mean_shares(steps)
    kind = f"{kind_of_run(rows, config)}, " if (config := saved_values(run)) else ""
    standing = _standing(run, owner, live, rows, summary, workers)
    parts: list[RenderableType] = [Text(f"{path}: {kind}{standing}"), Text(_pace(steps, live))]
    first = list(islice(metric_rows(path), RECENT_ROWS))
    if learning := _learning_table(first, rows):
        parts += [Text(""), learning]
    parts += _sample(run)
    notes = [f"reference: {live['reference']}"] if "reference" in live else []
    if lost := in_one_line(read_faults(run.faults)):
        notes.append(f"lost workers: {lost} (faults.jsonl)")
    if still := still_policy(steps):
        notes.append(still)
    at_work = bool(live) and not live.get("ended") and not _is_gone(owner)
    if at_work:
        notes += _disturbances(live)
    parts += [Text(""), *map(Text, notes)] if notes else []
    if shares:
        cause = diagnosis(steps, live.get("max_staleness", 0))
        parts += [Text(""), _roles_table(shares, len(steps)), Text(""), Text(cause.limit), Text(cause.advice)]
    if at_work and workers:
        parts += [Text(""), _work_table(live), Text(""), workers_table(live.get("workers", ()))]
    return Group(*parts)


def runs_below(path: Path) -> list[Path]:
    """The directories of runs in a directory, or one level deeper, by name: those with a configuration and something
    that a run writes later."""
    found = [RunDirectory(file.parent) for pattern in ("*/config.yaml", "*/*/config.yaml")
             for file in path.glob(pattern)]
    return sorted(run.path for run in found
                  if any(file.exists() for file in (run.metrics, run.status, run.summary, run.checkpoints)))


def runs_table(path: Path, runs: Sequence[Path]) -> Table:
    """A line for each run below `path`: what it does, how far it is, and its main metrics now and at the start."""
    table = plain_table("run", "trains by", "step", "state")
    table.add_column("reward or loss", justify="right")
    table.add_column("held out", justify="right")
    table.add_column("KL", justify="right")
    table.add_column("last row", justify="right")
    for one in runs:
        run = RunDirectory(one)
        try:
            table.add_row(str(one.relative_to(path)), *_line_of_run(run))
        except DataError as error:  # of one run; the others are shown
            table.add_row(str(one.relative_to(path)), "", "", str(error))
    return table


def _line_of_run(run: RunDirectory) -> tuple[str, ...]:
    rows = list(islice(metric_rows_from_end(run.path), RECENT_ROWS))[::-1]
    live, summary, owner = read_json(run.status), read_json(run.summary), read_owner(run.path)
    first = list(islice(metric_rows(run.path), RECENT_ROWS))
    if not rows and not live and summary:
        standing = Standing("", FINISHED)
    else:
        standing = _standing(run, owner, live, rows, summary, workers=False)
    progress = standing.progress.removeprefix("step ")
    columns = [("reward/mean", "sft/loss", "reward_model/accuracy", "process_reward/accuracy"),
               ("eval/reward", "eval/accuracy", "eval/loss"), ("kl/sequence",)]
    changed = [next(filter(None, (_change(first, rows, name) for name in names)), "") for names in columns]
    last = f"{duration(max(0.0, time.time() - rows[-1]['time']))} ago" if rows else ""
    return (kind_of_run(rows, saved_values(run)), progress, standing.state, *changed, last)


def _ends(first: Sequence[Mapping[str, Any]], last: Sequence[Mapping[str, Any]], name: str
          ) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """The first and the last row with a metric; None without one."""
    has = [row for row in first if isinstance(row.get(name), int | float)]
    now = [row for row in last if isinstance(row.get(name), int | float)]
    return ((has or now)[0], (now or has)[-1]) if has or now else None


def _change(first: Sequence[Mapping[str, Any]], last: Sequence[Mapping[str, Any]], name: str) -> str:
    """"0.12 → 0.83"; "" without the metric."""
    ends = _ends(first, last, name)
    if ends is None:
        return ""
    start, now = ends
    return (f"{number(start[name])} → " if start["step"] != now["step"] else "") + number(now[name])


def _learning_table(first: Sequence[Mapping[str, Any]], last: Sequence[Mapping[str, Any]]) -> Table | None:
    """The metrics of LEARNING at the start and now, each with its step; None without any."""
    table = plain_table("")
    for heading in ("start", "step", "now", "step"):
        table.add_column(heading, justify="right")
    for name, label in LEARNING.items():
        if ends := _ends(first, last, name):
            start, now = ends
            before = (number(start[name]), str(start["step"])) if start["step"] != now["step"] else ("", "")
            table.add_row(label, *before, number(now[name]), str(now["step"]))
    return table if table.row_count else None


def _sample(run: RunDirectory) -> list[RenderableType]:
    """One text of the newest step that has some."""
    rows = some_samples(run.samples, 1) if run.samples.is_dir() else []
    if not rows:
        return []
    newest = rows[-1]
    score = newest.get("score")
    title = f"a sample of step {newest['step']}" + ("" if score is None else f", score {number(score)}")
    return [Text(""), Text(f"{title}:"), Text(f"  prompt    {_shortened(in_lines(turns_of(newest)))}"),
            Text(f"  response  {_shortened(in_lines(response_of(newest)))}")]


def _shortened(text: Any) -> str:
    """The beginning of a text, with control characters as escapes, indented as one block."""
    lines = escaped(str(text or "").strip()[:TEXT_CHARACTERS]).splitlines() or [""]
    shown = "\n            ".join(lines[:TEXT_LINES])
    cut = len(lines) > TEXT_LINES or len(str(text or "").strip()) > TEXT_CHARACTERS
    return shown + (" ..." if cut else "")


def _disturbances(live: Mapping[str, Any]) -> list[str]:
    """Workers that are being replaced, the oldest open episodes, and a checkpoint under way."""
    down = [f"{line['worker']} is down: {line['lost']}; it is being replaced, for {line['seconds']:.1f} s"
            for line in live.get("down", ())]
    episodes = live.get("episodes") or {}
    waits = [f"step {live['step'] + 1} waits for {one}" for one in episodes.get("oldest", ())]
    if len(waits) < episodes.get("open", 0):
        waits.append(f"{episodes['open']} episodes are open")
    saving = live.get("checkpoint")
    return [*down, *waits, *([_saving(saving)] if saving else [])]


def _saving(saving: Mapping[str, Any]) -> str:
    return (f"checkpoint of step {saving['step']} under way for {duration(saving['seconds'])}"
            + (f" ({saving['doing']})" if saving["doing"] else ""))


def is_finished(path: Path) -> bool:
    """Whether the stage is over for good, or all runs of a directory that is none itself: its driver has left, its
    summary is written, and it was not asked to stop. Only `ppo` says how it ended; files of an earlier end do not count
    while a driver owns the run."""
    owner, run = read_owner(path), RunDirectory(path)
    if owner is None and not run.summary.exists() and (runs := runs_below(path)):
        return all(map(is_finished, runs))
    end = str(read_json(run.status).get("ended") or FINISHED)
    ended = owner is not None and owner.ended and bool(read_json(run.summary))
    return ended and end.startswith((FINISHED, STOPPED_EARLY))


def _is_gone(owner: Record | None) -> bool:
    """Whether the driver was killed, as far as this machine can tell."""
    return owner is not None and not owner.ended and owner.process.lives(ProcessIdentity.own()) is False


def _standing(run: RunDirectory, owner: Record | None, live: Mapping[str, Any], rows: Sequence[Mapping[str, Any]],
              summary: Mapping[str, Any], workers: bool) -> Standing:
    """Args: workers: name the process of a driver also when all is well."""
    gone = _is_gone(owner)
    process = f"{owner.process}" if owner else "its driver"
    since = f" since {day_and_time(owner.since)}" if owner else ""
    if not live:
        progress = f"step {rows[-1]['step']}" if rows else "no step yet"
        finished = owner is None or owner.ended or (run.summary.exists() and run.summary.stat().st_mtime > owner.since)
        if finished and "steps" in summary:
            return Standing(f"{progress} of {summary['steps']}", FINISHED)
        if owner is None or owner.ended:
            return Standing(progress, "")
        if gone:
            return Standing(progress, f"{process} {GONE}", calm=False)
        return Standing(progress, f"owned by {process}{since}" if workers else f"under way{since}", calm=False)
    step = max([live["step"], *(row["step"] for row in rows[-1:] if gone)])  # steps since the last status
    progress = f"step {step} of {live['steps']}"
    silent = time.time() - live["time"]
    if (ended := live.get("ended")) == "finished" and not summary:
        lost = silent > SILENT_S or gone
        state = "killed before its summary (--resume writes it)" if lost else "writing its summary"
        return Standing(progress, state, calm=False)
    if ended:
        return Standing(progress, ended)
    if silent > SILENT_S:
        return Standing(progress, f"no news for {duration(silent)}: {process} hangs or is gone (--resume continues the "
                        "run)", calm=False)
    if gone:
        return Standing(progress, f"{process} {GONE}", calm=False)
    return Standing(progress, f"running ({process}{since})" if workers else f"running{since}")


def _pace(steps: Sequence[Mapping[str, Any]], live: Mapping[str, Any]) -> str:
    if not steps:
        return "no step is finished yet"
    pace = _weighted(steps, "time/step") / len(steps)
    shown = [f"{pace:.3g} s a step"]
    if (rate := mean_rate(steps, "throughput/samples_per_second")) is not None:
        shown.append(f"{rate:.3g} samples/s")
    if live and not live.get("ended"):
        shown.append(f"{duration(pace * (live['steps'] - live['step']))} left")
    if live.get("quarantined"):
        left_out = live["quarantined"]
        shown.append(f"{left_out} sample{'' if left_out == 1 else 's'} left out (quarantine.jsonl)")
    return ", ".join(shown)


def _weighted(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(sum(row.get(name) or 0.0 for row in rows))


def _roles_table(shares: Mapping[str, Mapping[str, float]], steps: int) -> Table:
    """A line per role, busiest first; the shares of a line sum to all of the role's time."""
    table = plain_table("role")
    table.add_column("busy", justify="right")
    table.add_column(f"waiting for (last {steps} step{'' if steps == 1 else 's'})")
    for role, causes in sorted(shares.items(), key=lambda item: -item[1].get(BUSY, 0.0)):
        waits = sorted(((c, s) for c, s in causes.items() if c != BUSY and s >= SMALLEST), key=lambda item: -item[1])
        table.add_row(readable(role).lower(), f"{causes.get(BUSY, 0.0):.0%}",
                      ", ".join(f"{_cause(role, cause)} {share:.0%}" for cause, share in waits))
    return table


def _cause(role: str, cause: str) -> str:
    if cause == role:
        return "the others of its role"
    return "coordinator overhead" if cause == COORDINATOR else readable(cause).lower()


def _work_table(live: Mapping[str, Any]) -> Table:
    """Work in progress, oldest first."""
    buffer = live["buffer"]
    table = plain_table("under way", "work")
    table.add_column("for", justify="right")
    for line in live.get("down", ()):
        table.add_row(line["worker"], f"down: {line['lost']}; it is being replaced", f"{line['seconds']:.1f} s")
    for line in live["under_way"][:12]:
        calls = f" ({line['calls']} calls)" if line["calls"] > 1 else ""
        table.add_row(line["worker"], readable(line["phase"]).lower() + calls, f"{line['seconds']:.1f} s")
    if saving := live.get("checkpoint"):
        table.add_row("checkpoint", _saving(saving), f"{saving['seconds']:.1f} s")
    for chunks in live.get("chunks", ()):
        what = (f"{chunks['chunks']} of {chunks['samples']} samples being {chunks['doing']}, the oldest is "
                f"{chunks['oldest']}, admitted at version {chunks['version']}")
        table.add_row("chunks", what, f"{chunks['seconds']:.1f} s")
    for lease in live.get("leases", ()):
        table.add_row("lease", f"{lease['samples']} samples for the update of version {lease['version']}, held by "
                      + ", ".join(readable(role).lower() for role in lease["held_by"]), "")
    table.add_row("buffer", f"{buffer['ready']} samples ready, {buffer['under_way']} being made, "
                  f"{buffer['training']} in training", f"{buffer['mb']:.1f} MiB")
    return table
