"""`rlhf-ray doctor`: can this machine run us, and what to do where it cannot."""

import typer


def doctor() -> None:
    """Check Python, packages, CPU, GPUs, NCCL, memory, disk, ports and token, and say what to do where something is
    wrong."""
    from rich.console import Console
    from rich.table import Table

    from rlhf_ray.cli.machine import inspect_machine

    marks = {"ok": "[green]ok[/]", "warn": "[yellow]look[/]", "fail": "[red]wrong[/]"}
    findings = inspect_machine()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for finding in findings:
        table.add_row(marks[finding.status], finding.name, finding.found)
        if finding.advice:
            table.add_row("", "", f"[italic]{finding.advice}[/]")
    Console(highlight=False).print(table)
    wrong = sum(f.status == "fail" for f in findings)
    typer.echo("nothing stands in the way of a run" if not wrong else f"{wrong} to put right before a run")
    raise typer.Exit(1 if wrong else 0)
