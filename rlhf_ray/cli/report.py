"""`rlhf-ray report`: draw a run's page again from what it wrote."""

from pathlib import Path
from typing import Annotated

import typer

from rlhf_ray.errors import DataError


def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")]) -> None:
    """Write report.html of a run again, from its metrics and samples."""
    if not run.is_dir():
        raise DataError(f"there is no run directory {run}; name the one that a stage wrote (its run.dir)")
    from rlhf_ray.observability.report import write_report

    typer.echo(f"wrote {write_report(run)}")
