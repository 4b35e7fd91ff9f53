"""A run among faults that never was: its files as a real one leaves them."""

import json
from pathlib import Path

import pytest

from chaos.plan import Fault
from chaos.supervisor import ChaosRun, Start


class MadeUp:
    """A course to be written line by line; times are seconds."""

    def __init__(self, place: Path) -> None:
        (place / "run").mkdir()
        self.record = ChaosRun(place / "run_1.yaml", place / "run", [])
        self._place = place

    def start(self, began: float, ended: float, code: int, expected: int, said: str = "") -> None:
        log = self._place / f"{len(self.record.starts)}.log"
        log.write_text(said)
        self.record.starts.append(Start(1, began, ended, code, expected, log, wedged=False))

    def fault(self, kind: str) -> int:
        self.record.faults.append(Fault(len(self.record.faults) + 1, kind, 1))
        return len(self.record.faults)

    def line(self, event: str, time: float, **told: object) -> None:
        with self.record.strikes.path.open("a") as file:
            file.write(json.dumps({"event": event, "time": time, **told}) + "\n")

    def struck(self, kind: str, time: float, confirmed: bool = True, in_state: bool = True, **told: object) -> int:
        number = self.fault(kind)
        self.line("struck", time, fault=number, kind=kind, state="at work", in_state=in_state, **told)
        if confirmed:
            self.line("confirmed", time, fault=number, state="gone", seconds=0.1)
        return number

    def event(self, role: str, pid: int | None, lost_at: float, recovery_s: float | None, outcome: str = "",
              reason: str = "it died") -> None:
        with (self.record.directory / "faults.jsonl").open("a") as file:
            file.write(json.dumps({"role": role, "pid": pid, "lost_at": lost_at, "recovery_s": recovery_s,
                                   "outcome": outcome, "reason": reason, "rank": 0, "method": "generate"}) + "\n")


@pytest.fixture
def made_up(tmp_path):
    return MadeUp(tmp_path)
