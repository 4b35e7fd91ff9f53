"""One submitted job: its run, its state, and how it ended."""

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_ray.errors import RunInterrupted, describe_ending, is_restartable, shell_code

KILLED = shell_code(-signal.SIGKILL)
STOPPED = "stopped; --resume continues it"


@dataclass(frozen=True)
class Job:
    """A job that this package submitted. Times are seconds since 1970, None for what has not happened."""

    id: str
    state: str
    """Ray's state: PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED."""
    about: Mapping[str, str] = field(default_factory=dict)
    """Metadata given at submission: run, stage, commit, digest, dir, arguments (JSON)."""
    message: str = ""
    began: float | None = None
    ended: float | None = None
    code: int | None = None
    """Exit code of the run, or minus the signal that killed it; None before its end, and for a job that Ray stopped."""
    node: str | None = None
    """Ray's id of the driver's node."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Ray's runtime environment of the job."""

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return self.state in ("STOPPED", "SUCCEEDED", "FAILED")

    @property
    def ours(self) -> bool:
        """Whether this package submitted it."""
        return "stage" in self.about and "run" in self.about

    @property
    def exit_code(self) -> int:
        """Exit code of a command that followed the job to its end: the run's own code, 128 plus the signal's number for
        a run killed by a signal, 75 for a stopped one."""
        if self.code is not None:
            return shell_code(self.code)
        return {"SUCCEEDED": 0, "STOPPED": RunInterrupted.exit_code}.get(self.state, 1)

    @property
    def arguments(self) -> list[str]:
        """Arguments of `submit`, without the address and --resume."""
        return list(json.loads(self.about.get("arguments", "[]")))

    @property
    def resumable(self) -> bool:
        """Whether its run may go on with --resume: it was stopped, killed, or lost something outside of its process."""
        return self.ours and (self.exit_code == RunInterrupted.exit_code or is_restartable(self.exit_code))

    def describe_state(self) -> str:
        """The job's state in words."""
        if self.state == "FAILED":
            return self._describe_failure()
        return {"PENDING": "waiting to start", "RUNNING": "running", "SUCCEEDED": "finished",
                "STOPPED": STOPPED}.get(self.state, self.state.lower())

    def _describe_failure(self) -> str:
        code = self.exit_code
        if code == RunInterrupted.exit_code:
            return STOPPED
        if code == KILLED:
            ending = "killed"
        elif code > 128:
            ending = f"killed by {signal.Signals(code - 128).name}"
        else:
            ending = describe_ending(code)
        return f"{ending}; --resume may continue it" if self.resumable else ending
