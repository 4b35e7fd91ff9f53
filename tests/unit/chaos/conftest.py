"""A stand-in for a run with faults: its files as a real run writes them."""

import json
from pathlib import Path

import pytest

from chaos.faults import Fault
from chaos.run_record import RunRecord, Start


class FakeRun:
    """A run whose files tests write line by line; times are seconds."""

    def __init__(self, directory: Path) -> None:
        (directory / "run").mkdir()
        self.record = RunRecord(directory / "run_1.yaml", directory / "run", [])
        self._directory = directory

    def start(self, began: float, ended: float, code: int, expected: int, said: str = "") -> None:
        log = self._directory / f"{len(self.record.starts)}.log"
        log.write_text(said)
        self.record.starts.append(Start(1, began, ended, code, expected, log, wedged=False))

    def fault(self, kind: str) -> int:
        self.record.faults.append(Fault(len(self.record.faults) + 1, kind, 1))
        return len(self.record.faults)

    def line(self, event: str, time: float, **fields: object) -> None:
        with self.record.injections.path.open("a") as file:
            file.write(json.dumps({"event": event, "time": time, **fields}) + "\n")

    def injected(self, kind: str, time: float, confirmed: bool = True, in_state: bool = True, **fields: object) -> int:
        number = self.fault(kind)
        self.line("injected", time, fault=number, kind=kind, state="at work", in_state=in_state, **fields)
        if confirmed:
            self.line("confirmed", time, fault=number, state="gone", seconds=0.1)
        return number

    def event(self, role: str, pid: int | None, lost_at: float, recovery_s: float | None, outcome: str = "",
              reason: str = "it died", **fields: object) -> None:
        with (self.record.directory / "faults.jsonl").open("a") as file:
            file.write(json.dumps({"role": role, "pid": pid, "lost_at": lost_at, "recovery_s": recovery_s,
                                   "outcome": outcome, "reason": reason, "rank": 0, "method": "generate",
                                   "time": lost_at, **fields}) + "\n")


@pytest.fixture
def fake_run(tmp_path):
    return FakeRun(tmp_path)
