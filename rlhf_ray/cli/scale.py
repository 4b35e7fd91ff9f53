"""`rlhf-ray scale`: more or fewer generators for a run that goes on."""

from pathlib import Path
from typing import Annotated

import typer

from rlhf_ray.cli.arguments import require_run


def scale(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's directory.")],
    generators: Annotated[int, typer.Option(min=1, help="How many generators there are to be.")],
    timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Longest wait for the answer.")] = 900.0,
) -> None:
    """Add generators to a run that goes on, or remove some, and say what happened.

    New ones are brought to the present weights before they get prompts, in a bundle more of their pool where it has no
    room; those that go finish what they have begun, or leave it to others. The run's results stay what they are, and
    --resume begins with the number that was left.
    """
    require_run(run)
    from rlhf_ray.observability.control import ask

    typer.echo(ask(run, "scale", {"generators": generators}, timeout_s=timeout)["said"])
