"""The errors of this package. Their messages say what happened, with the values, and what to do.

Every expected error derives from `RLHFError`. The command line prints its message alone, without a traceback, and exits
with `exit_code`: 0 when all steps were made, 1 after a failure, otherwise a code of `ENDINGS`.
"""

import signal
from collections.abc import Mapping, Sequence
from typing import Any, Literal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Requests to stop."""

ENDINGS: Mapping[int, str] = {
    2: "was refused",
    3: "stopped itself early",
    68: "lost its Ray cluster, or could not connect to it",
    69: "lost a worker, its disk hangs, or an essential task failed",
    74: "completed, but its upload did not",
    75: "was stopped, with a checkpoint",
    77: "was superseded by another driver",
}
"""What a run did that ended with this exit code. From 64 on they are those of sysexits.h: EX_NOHOST, EX_UNAVAILABLE,
EX_IOERR, EX_TEMPFAIL, EX_NOPERM."""
RESTARTABLE = frozenset({68, 69})
"""Exit codes of runs that lost something outside of their process: with --resume, the same command may succeed."""


class RLHFError(Exception):
    """Base of all errors with a message for the user."""

    exit_code = 1

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries; subclasses with several arguments still unpickle from their message.
        return _rebuild, (type(self), str(self))


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's name where it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def with_lines(text: str, lines: str, advice: str) -> str:
    """A message with lines below its first sentence, and the advice below them."""
    advice = advice[:1].upper() + advice[1:]
    if not lines and "\n" not in text:
        return f"{text}. {advice}"
    return "\n".join(filter(None, (text, lines, advice)))


def _rebuild(cls: type[RLHFError], message: str) -> RLHFError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    return error


class ConfigError(RLHFError):
    """A configuration that cannot run; names the field, the value and the fix."""

    exit_code = 2


class DataError(RLHFError):
    """Input rows or files that cannot be used; names the file and the line."""

    exit_code = 2


class ModelError(RLHFError):
    """A model or tokenizer that is missing, damaged or does not match its counterpart."""

    exit_code = 2


class RewardError(RLHFError):
    """A reward that is not a finite number, or an invalid answer of a scorer. It never becomes a zero."""


class SampleError(RewardError):
    """A reward that failed perhaps because of a sample: other samples may have scores."""


class UnscoredSamples(RewardError):
    """Samples that have no score even when scored alone. They are set aside, or end the run.

    Args:
        samples: a `records.Unscored` for each.
    """

    def __init__(self, message: str, samples: Sequence[Any]) -> None:
        super().__init__(message)
        self.samples = tuple(samples)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.samples)


class EnvironmentFailed(RLHFError):
    """The code of an environment cannot be loaded, or has none of the known shapes; names `environments.NAME.path`."""

    exit_code = 2


class EpisodeFailed(RLHFError):
    """The environment of one episode failed; others are unharmed."""

    def __init__(self, cause: Literal["error_timeout", "error_environment", "error_agent"], message: str) -> None:
        super().__init__(message)
        self.cause: Literal["error_timeout", "error_environment", "error_agent"] = cause
        """A deadline passed; or the environment or the agent raised an error, answered nonsense or lost its process."""

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.cause, str(self))


class ReplayDiverged(RLHFError):
    """The process of an episode's environment was lost through no fault of the episode, and cannot be brought back to
    where it was: its answers differ, or it is not replayable. The episode must begin again."""


class WeightsError(RLHFError):
    """Published weights that arrived incomplete: wrong checksum, missing tensor, unexpected version."""


class GeneratorMismatch(WeightsError):
    """A generator that computes with other weights than the learner's of the version that it confirmed."""


class DamagedBucket(WeightsError):
    """Bytes or description of a bucket of weights differ from those that the learner sealed. Sent again, it may arrive
    intact."""


class NoWeightsPlan(WeightsError):
    """A learner without a plan for sending weights was asked for them, such as one that has just started."""


class CheckpointError(RLHFError):
    """A checkpoint that cannot be written, or whose bytes differ from its manifest."""


class DiskStalled(RLHFError):
    """A file operation of the run made no progress for longer than `cluster.disk_timeout_s`: its disk hangs. Names the
    operation, the file and the seconds. Exit code 69 (EX_UNAVAILABLE), as for a lost worker: --resume may help."""

    exit_code = 69


class BackgroundTaskError(RLHFError):
    """An essential background task, such as the health checks of workers, failed repeatedly. Exit code 69: --resume may
    help."""

    exit_code = 69


class UploadError(RLHFError):
    """The upload of a run (`run.upload`) is incomplete, but the run itself completed; or that of an exported model to
    the Hub. Exit code 74 (EX_IOERR)."""

    exit_code = 74


class BufferError(RLHFError):  # the replay buffer's own error; the builtin is about memoryviews
    """A replay-buffer operation that breaks its contract (a chunk that is not reserved, a lease that is not out,
    samples that never fill a batch)."""


class LedgerError(RLHFError):
    """Samples that are not accounted for, or a ledger that cannot be read or written."""


class TrainingError(RLHFError):
    """Training that cannot continue: too many consecutive updates without finite numbers, or updates out of order."""


class WorkerError(RLHFError):
    """A worker process that died, hung past its deadline, or could not be placed; names role, rank and call. Exit code
    69 (EX_UNAVAILABLE) tells a scheduler that --resume may help."""

    exit_code = 69
    role: str = ""
    """Of the worker, if known."""

    def __init__(self, message: str, role: str = "") -> None:
        super().__init__(message)
        self.role = role


class WorkerBroken(WorkerError):
    """A worker reports that it is alive but broken: an engine or process that it needs has died. It must be
    restarted."""


class WorkerLost(WorkerError):
    """A call that its worker will not answer. It is not the role's own error: another worker may answer."""

    rank: int = -1
    incarnation: int = 0
    """Which process of that rank, counted from 1."""
    method: str = ""
    kind: Literal["died", "hung", "broke", "result", "stale"] = "died"
    """The process is gone; it did not answer or made no progress in time; it reports that it is broken; its result, or
    an argument, is no longer in the object store; it answered after it had been given up."""
    age_s: float = 0.0
    """Seconds from the call until it was given up."""

    def __init__(
        self, message: str, role: str = "", rank: int = -1, incarnation: int = 0, method: str = "",
        kind: Literal["died", "hung", "broke", "result", "stale"] = "died", age_s: float = 0.0,
    ) -> None:
        super().__init__(message, role)
        self.rank = rank
        self.incarnation = incarnation
        self.method = method
        self.kind = kind
        self.age_s = age_s

    def __reduce__(self) -> tuple[object, ...]:
        # Workers report the loss of other workers to the driver.
        return type(self), (str(self), self.role, self.rank, self.incarnation, self.method, self.kind, self.age_s)

    @property
    def worker(self) -> str:
        """Readable name of the worker, e.g. "generator/1"."""
        return f"{self.role}/{self.rank}"


class ClusterError(RLHFError):
    """A Ray cluster that cannot be reached or lacks resources that the configuration requests."""


class SupersededError(RLHFError):
    """Another driver has taken over the run's directory, and this one stops writing there. Exit code 77 (EX_NOPERM) is
    final: a restarted run would compete with its successor."""

    exit_code = 77


class ClusterUnavailable(ClusterError):
    """A Ray cluster that does not answer, or whose head was lost. Exit code 68 (EX_NOHOST) tells a scheduler that
    --resume may help once the cluster is back."""

    exit_code = 68


class StoppedEarly(RLHFError):
    """The run ended itself before its last step, because of `early_stop`; checkpoint, model and summary are written.
    Exit code 3 distinguishes it from a run that completed (0) and from one that failed (1)."""

    exit_code = 3


class RunInterrupted(RLHFError):
    """The run was stopped on request and left a resumable checkpoint; exit code 75 (EX_TEMPFAIL) tells a scheduler."""

    exit_code = 75


def describe_ending(code: int) -> str:
    """What a run did that ended with this exit code, with the code."""
    return f"{ENDINGS.get(code, 'failed')} (exit code {code})"


def is_restartable(code: int) -> bool:
    """Whether the same command with --resume may succeed after a run ended so: a signal killed it that is no request to
    stop, or it lost something outside of its process.

    Args:
        code: the exit code, or the negative number of a signal; or the shell's code of one.
    """
    number = shell_code(code) - 128
    return (number > 0 and number not in STOP_SIGNALS) or code in RESTARTABLE


def shell_code(code: int) -> int:
    """The exit code by which a shell reports a process: 128 plus the number of the signal that killed it.

    Args:
        code: as `subprocess.Popen.returncode`: the negative number of a signal that killed it.
    """
    return code if code >= 0 else 128 - code
