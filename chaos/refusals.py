"""Prompts that the reward service refused: each must have left the run by name, and nobody else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from chaos.supervisor import ChaosRun
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.replay.ledger import open_for_reading

SAID = "answers 400"
"""In the reason that the run gives."""


def left_by_name(record: ChaosRun, prompt: str) -> bool:
    """Whether the ledger has quarantined a row whose prompt begins so, and the run names it with its reason."""
    return any(_begins(prompt, line) for line in _named(record))


def others_left(record: ChaosRun) -> Iterator[str]:
    """Rows that are quarantined although nobody refused their prompts, or whose prompts are not named."""
    refused = [line["prompt"] for line in record.strikes.read("confirmed") if "prompt" in line]
    meant = {line["key"][1] for line in _named(record) if any(_begins(prompt, line) for prompt in refused)}
    if odd := _quarantined(record) - meant:
        yield f"rows {sorted(odd)} are quarantined, and were not refused by the reward service, or are not named"


def _named(record: ChaosRun) -> list[dict[str, Any]]:
    """The run's lines about samples that the ledger has quarantined, with the service's own reason."""
    file, rows = RunDirectory(record.directory).quarantine, _quarantined(record)
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return [line for line in lines if line["key"][1] in rows and SAID in line["reason"]]


def _quarantined(record: ChaosRun) -> set[int]:
    with closing(open_for_reading(RunDirectory(record.directory).ledger)) as db:
        return {row for (row,) in db.execute("SELECT DISTINCT row FROM samples WHERE state = 'quarantined'")}


def _begins(prompt: str, line: dict[str, Any]) -> bool:
    words = prompt.split()
    return bool(line["prompt"].split()[: len(words)] == words)
