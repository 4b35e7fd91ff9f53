"""What `rlhf-ray status` says of a job of a cluster."""

from pathlib import Path

import typer

from rlhf_ray.cluster.jobs.server import connect
from rlhf_ray.observability.followed import newest_step


def print_job(name: str, address: str) -> None:
    """Say how a job stands, what it is, and how far its run is."""
    server = connect(address, allow_open=True)  # it only reads, and a token was shown to nobody who did not ask for one
    job = server.job(name)
    about = job.about
    typer.echo(f"{job.id}: {job.standing()}")
    for title, key in (("run", "dir"), ("stage", "stage"), ("commit", "commit"), ("configuration", "config"),
                       ("submitted by", "by")):
        if about.get(key):
            typer.echo(f"{title}: {about[key]}")
    if line := newest_step(server.logs(job.id)):
        typer.echo(line)
    if about.get("dir") and Path(about["dir"]).is_dir():
        from rich.console import Console

        from rlhf_ray.observability.status_page import status_page

        Console(highlight=False, soft_wrap=True).print(status_page(Path(about["dir"])))
