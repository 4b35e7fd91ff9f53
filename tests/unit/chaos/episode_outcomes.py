"""What becomes of faults in runs with episodes."""

import json

from chaos.outcomes import outcomes


def problems(run):
    """What was wrong with each fault's outcome."""
    return [outcome.problem for outcome in outcomes(run.record)]


def row(run, step, **numbers):
    """Write the metrics of a step."""
    with (run.record.directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "time": 1.0, **{f"episodes/{k}": v for k, v in numbers.items()}}) + "\n")
