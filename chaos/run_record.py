"""The record of one run with faults: its driver processes, its injection log, and what they left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from chaos.faults import Fault
from chaos.injection_log import InjectionLog
from rlhf_ray.errors import DiskStalled
from rlhf_ray.failpoints import EXIT_CODE


@dataclass(frozen=True)
class Start:
    """One driver process, from its start to its end."""

    pid: int
    began: float
    ended: float
    """Time in seconds since 1970."""
    code: int
    expected: int
    log: Path
    wedged: bool

    @property
    def abrupt(self) -> bool:
        """Whether it ended without any cleanup, or where it could write nothing: on a disk that hangs."""
        return self.code < 0 or self.code in (EXIT_CODE, DiskStalled.exit_code)

    def last_words(self) -> str:
        """The end of its output."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:])[-600:]


@dataclass
class RunRecord:
    """One run with faults."""

    config: Path
    """The run's configuration; the supervisor's files are in the same directory."""
    directory: Path
    """`run.dir` of the configuration."""
    faults: list[Fault]
    starts: list[Start] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Processes and shared memory that outlived a driver."""
    interruption: BaseException | None = None
    """Ctrl-C or SIGTERM, if the run was interrupted by one."""
    on_injection: Callable[[str], None] = field(default=lambda _: None)
    """Called with one line for each fault when it is injected."""
    reported: int = 0
    """Number of faults reported so far."""

    @property
    def injections(self) -> InjectionLog:
        """The log of the faults that were injected."""
        return InjectionLog(self.config.with_suffix(".injections.jsonl"))

    @property
    def journals(self) -> Path:
        """The directory of the witness's journals. It is not on the disk of the runs, which faults fill and stop."""
        return self.config.parent.with_name(f"{self.config.parent.name}_journals") / self.config.stem

    def report_injections(self) -> None:
        """Report the faults that were injected since the last call."""
        for line in self.injections.read("injected")[self.reported :]:
            self.reported += 1
            victim = f"{line['role']}/{line['rank']}, " if "role" in line else ""
            after = f", after update {line['step']}" if "step" in line else ""
            self.on_injection(f"[{self.reported}/{len(self.faults)}] {line['kind']}: {victim}{line['state']}{after}")
