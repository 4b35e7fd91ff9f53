"""The status of a run in a terminal: its progress, what each role does and waits for, and what to change first."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhf_ray.errors import DataError
from rlhf_ray.observability.bottleneck import BUSY, COORDINATOR, diagnosis, mean_shares
from rlhf_ray.observability.control_files import SILENT_S
from rlhf_ray.observability.faults import in_one_line, read_faults
from rlhf_ray.observability.metric_catalogue import readable
from rlhf_ray.observability.metrics import metric_rows_from_end
from rlhf_ray.observability.owner_record import ProcessIdentity, Record, day_and_time, read_owner
from rlhf_ray.observability.progress import duration
from rlhf_ray.observability.report import in_a_sentence
from rlhf_ray.observability.row_means import mean_rate
from rlhf_ray.observability.run_directory import RunDirectory, read_json
from rlhf_ray.observability.still_policy import still_policy
from rlhf_ray.observability.tables import plain_table, workers_table

RECENT_STEPS = 20
"""Number of steps over which shares of time are averaged."""
RECENT_ROWS = 10 * RECENT_STEPS
"""Rows of metrics that are read: those of steps, and of the evaluations between them."""
GONE = "is gone (--resume continues the run)"
FINISHED, STOPPED_EARLY = "finished", "stopped early"
"""Ends of a run after which it does not go on."""
SMALLEST = 0.005
"""Shares below this are not shown."""


def status_page(path: Path) -> RenderableType:
    """The run in `path` as a rich renderable.

    Raises:
        DataError: the directory holds no run, or its files are damaged.
    """
    run = RunDirectory(path)
    rows = list(islice(metric_rows_from_end(path), RECENT_ROWS))[::-1]
    live, summary, owner = read_json(run.status), read_json(run.summary), read_owner(path)
    if not rows and not live and summary:
        return Text(f"{path}: {in_a_sentence(summary)}")
    if not rows and not live and (owner is None or owner.ended):
        below = ", ".join(sorted(str(file.parent) for file in path.glob(f"*/{run.config.name}")))
        raise DataError(f"{path} holds no started run: it has neither {run.metrics.name} nor {run.status.name}, and no "
                        "driver owns it; name the directory that a stage writes (its run.dir)"
                        + (f", such as {below}" if below else ""))
    steps = [row for row in rows if "time/step" in row][-RECENT_STEPS:]
    shares = mean_shares(steps)
    parts: list[RenderableType] = [Text(_headline(run, owner, live, rows, summary)), Text(_pace(steps, live))]
    if "reference" in live:
        parts.append(Text(f"reference: {live['reference']}"))
    if lost := in_one_line(read_faults(run.faults)):
        parts.append(Text(f"lost workers: {lost} (faults.jsonl)"))
    if still := still_policy(steps):
        parts.append(Text(still))
    if shares:
        cause = diagnosis(steps, live.get("max_staleness", 0))
        parts += [Text(""), _roles_table(shares, len(steps)), Text(""), Text(cause.limit), Text(cause.advice)]
    if live and not live.get("ended") and not _is_gone(owner):
        parts += [Text(""), _work_table(live), Text(""), workers_table(live.get("workers", ()))]
    return Group(*parts)


def is_finished(path: Path) -> bool:
    """Whether the stage is over for good: its driver has left, its summary is written, and it was not asked to stop.
    Only `ppo` says how it ended; files of an earlier end do not count while a driver owns the run."""
    owner, run = read_owner(path), RunDirectory(path)
    end = str(read_json(run.status).get("ended") or FINISHED)
    ended = owner is not None and owner.ended and bool(read_json(run.summary))
    return ended and end.startswith((FINISHED, STOPPED_EARLY))


def _is_gone(owner: Record | None) -> bool:
    """Whether the driver was killed, as far as this machine can tell."""
    return owner is not None and not owner.ended and owner.process.lives(ProcessIdentity.own()) is False


def _headline(run: RunDirectory, owner: Record | None, live: Mapping[str, Any], rows: Sequence[Mapping[str, Any]],
              summary: Mapping[str, Any]) -> str:
    gone = _is_gone(owner)
    process = f"{owner.process}" if owner else "its driver"
    if not live:
        where = f"{run.path}: " + (f"step {rows[-1]['step']}" if rows else "no step yet")
        finished = owner is None or owner.ended or (run.summary.exists() and run.summary.stat().st_mtime > owner.since)
        if finished and "steps" in summary:
            return f"{where} of {summary['steps']}, finished"
        if owner is None or owner.ended:
            return where
        return f"{where}; " + (f"{process} {GONE}" if gone else f"owned by {process} since {day_and_time(owner.since)}")
    step = max([live["step"], *(row["step"] for row in rows[-1:] if gone)])  # steps since the last status
    where = f"{run.path}: step {step} of {live['steps']}"
    silent = time.time() - live["time"]
    if (ended := live.get("ended")) == "finished" and not summary:
        lost = silent > SILENT_S or gone
        return f"{where}; " + ("killed before its summary (--resume writes it)" if lost else "writing its summary")
    if ended:
        return f"{where}, {ended}"
    if silent > SILENT_S:
        return f"{where}; no news for {duration(silent)}: {process} hangs or is gone (--resume continues the run)"
    if gone:
        return f"{where}; {process} {GONE}"
    return f"{where}, running ({process}" + (f" since {day_and_time(owner.since)})" if owner else ")")


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
        table.add_row("checkpoint", f"checkpoint of step {saving['step']} under way for "
                      f"{duration(saving['seconds'])}" + (f" ({saving['doing']})" if saving["doing"] else ""),
                      f"{saving['seconds']:.1f} s")
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
