"""`rlhf-ray status`: how far a run is, and why it waits."""

import time
from pathlib import Path
from typing import Annotated

import typer

from rlhf_ray.cli.arguments import require_run


def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory; or a job's id, with --address.")],
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it anew every two seconds; Ctrl-C ends.")] = False,
    address: Annotated[str | None, typer.Option(
        envvar="RAY_API_SERVER_ADDRESS", help="The cluster's job server (http://HOST:8265) that has the job.")] = None,
) -> None:
    """Show how far a run is, what each role did and waited for, who holds what, and what to change first.

    It reads the run's directory alone, so it works from any machine that sees it, during the run and after. Of a job
    of a cluster it shows how that stands, and the run where this machine sees its directory.
    """
    if address and not run.is_dir():
        from rlhf_ray.cli.job_page import print_job

        print_job(str(run), address)
        return
    require_run(run)
    from rich.console import Console
    from rich.live import Live

    from rlhf_ray.observability.status_page import status_page

    console = Console(highlight=False, soft_wrap=True)
    if not watch:
        console.print(status_page(run))
        return
    with Live(status_page(run), console=console, refresh_per_second=2) as view:
        while True:
            time.sleep(2)
            view.update(status_page(run))
