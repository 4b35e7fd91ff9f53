"""One job as a person asks for it: which run it is, how it stands, how it ended."""

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_ray.errors import RunInterrupted, StoppedEarly, WorkerError

KILLED = 128 + signal.SIGKILL
"""As a shell has it."""
ENDINGS = {
    RunInterrupted.exit_code: "stopped; --resume goes on",
    StoppedEarly.exit_code: "stopped itself early",
    WorkerError.exit_code: "lost a worker; --resume may go on",
    KILLED: "killed; --resume may go on",
}
"""Exit codes of a run that say more than that it failed."""


@dataclass(frozen=True)
class Job:
    """A job that this package submitted. Times are seconds since 1970, None for what has not happened."""

    id: str
    state: str
    """Ray's word: PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED."""
    about: Mapping[str, str] = field(default_factory=dict)
    """What was said of it when it was submitted: run, stage, commit, digest, dir, arguments (JSON)."""
    message: str = ""
    began: float | None = None
    ended: float | None = None
    code: int | None = None
    """Exit code of the run, or minus the signal that it died of; None before its end, and for one that Ray stopped."""
    node: str | None = None
    """Ray's name of the node that its driver is on."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Ray's runtime environment: what was packed."""

    @property
    def over(self) -> bool:
        """Whether nothing more comes."""
        return self.state in ("STOPPED", "SUCCEEDED", "FAILED")

    @property
    def ours(self) -> bool:
        """Whether this package submitted it."""
        return "stage" in self.about and "run" in self.about

    @property
    def exit_code(self) -> int:
        """What a command that followed it to its end exits with: the run's own code, 128 and the signal's number for
        one that died of a signal, 75 for one that was stopped."""
        if self.code is not None:
            return self.code if self.code >= 0 else 128 - self.code
        return {"SUCCEEDED": 0, "STOPPED": RunInterrupted.exit_code}.get(self.state, 1)

    @property
    def arguments(self) -> list[str]:
        """What `submit` was given besides address and --resume."""
        return list(json.loads(self.about.get("arguments", "[]")))

    def standing(self) -> str:
        """How it stands, in words."""
        if self.state == "FAILED":
            return ENDINGS.get(self.exit_code, f"failed (exit code {self.exit_code})")
        return {"PENDING": "waiting to start", "RUNNING": "running", "SUCCEEDED": "finished",
                "STOPPED": "stopped; --resume goes on"}.get(self.state, self.state.lower())
