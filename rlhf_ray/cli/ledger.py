"""`rlhf-ray ledger`: what became of every sample of a run."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_ray.cli.run_commands import require_run

if TYPE_CHECKING:
    import sqlite3


def ledger(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")],
    prompt: Annotated[int | None, typer.Option("--prompt", metavar="ROW", min=0, help="Tell the story of one prompt, "
                                               "by its row in the data set.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Audit the ledger; exit code 1 if something does not "
                                        "add up.")] = False,
) -> None:
    """Show how many samples are under way, trained on, committed, quarantined or were given up; during a run and after.

    A sample is committed when a checkpoint holds the update that consumed it, not_applied when that update changed
    no weight, because no loss and gradient was finite, and unused when the run ended before its turn.
    --check goes through the invariants: the prompts in the ledger are those that the data cursor handed out, each once;
    updates without a gap and each of one whole batch; staleness within its bound; nothing open after the run's end.
    """
    require_run(run)
    from rlhf_ray.observability.run_directory import RunDirectory
    from rlhf_ray.replay.audit import require_sound
    from rlhf_ray.replay.ledger import open_for_reading

    directory = RunDirectory(run)
    with closing(open_for_reading(directory.ledger)) as db:
        if prompt is not None:
            _tell(db, prompt)
        else:
            _show(db)
        if check:
            require_sound(db, directory.finished_stage() is not None)
            typer.echo("the audit found nothing wrong")


def _show(db: "sqlite3.Connection") -> None:
    from rlhf_ray.replay.audit import counts

    found = counts(db)
    width = max(map(len, found))
    for name, number in found.items():
        typer.echo(f"{name:<{width}}  {number:>10,}")


def _tell(db: "sqlite3.Connection", row: int) -> None:
    """Every attempt at the samples of one prompt, by epoch and sample."""
    lines = db.execute(
        "SELECT epoch, sample, attempt, 0, state, worker, reason, NULL, NULL FROM attempts WHERE row = ?1 UNION "
        "SELECT epoch, sample, attempt, 1, state, worker, reason, version, step FROM samples WHERE row = ?1 "
        "ORDER BY 1, 2, 3", (row,)).fetchall()
    if not lines:
        typer.echo(f"the run has not come to row {row}")
    for epoch, sample, attempt, current, state, worker, reason, version, step in lines:
        by = f", drawn by {worker}" if worker else ""
        tail = "".join((f", version {version}" if version is not None else "", f", update {step}" if step else "",
                        f": {reason}" if reason else ""))
        fate = f"is {state}" if current else f"came as far as {state} and was given up"
        typer.echo(f"epoch {epoch}, sample {sample}: attempt {attempt} {fate}{by}{tail}")
