"""`rlhf-ray report`: draw a run's page again from what it wrote."""

from pathlib import Path
from typing import Annotated

import typer

from rlhf_ray.cli.arguments import require_run


def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")]) -> None:
    """Write report.html of a run again, from its metrics and samples."""
    require_run(run)
    from rlhf_ray.observability.report import write_report

    typer.echo(f"wrote {write_report(run)}")
