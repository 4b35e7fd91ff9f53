"""What can fail, said so that the next person knows what happened, with which values, and what to do.

Every error we raise on purpose derives from `RLHFError`. The command line prints its message alone, without a
traceback, and exits with `exit_code`. `retryable` says whether doing the same thing again may succeed; codes of
sysexits.h where one fits:

     0  made all its steps
     1  broke
     2  refused: configuration, data or models cannot work, or another driver owns the directory
     3  stopped early
    68  lost its Ray cluster, or could not connect to it (EX_NOHOST); retryable
    69  lost a worker, its disk hangs, or an essential task failed (EX_UNAVAILABLE); retryable
    74  ended well, while its copies are not complete (EX_IOERR)
    75  was asked to stop, and saved (EX_TEMPFAIL); retryable
    77  was superseded by another driver (EX_NOPERM)
"""

from collections.abc import Sequence
from typing import Any, Literal


class RLHFError(Exception):
    """Base of all errors with a message meant for a person."""

    exit_code = 1
    retryable = False

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries; subclasses with several arguments still unpickle from their message.
        return _rebuild, (type(self), str(self))


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's name where it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


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
    """A reward that is not a finite number, or a scorer that did not answer as agreed. Never turned into a zero."""


class SampleError(RewardError):
    """A reward that failed in a way for which a sample may be to blame: others may well be scored."""


class UnscoredSamples(RewardError):
    """Samples found to have no score, one by one, where such samples are set aside instead of ending the run.

    Args:
        samples: a `records.Unscored` for each.
    """

    def __init__(self, message: str, samples: Sequence[Any]) -> None:
        super().__init__(message)
        self.samples = tuple(samples)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.samples)


class WeightsError(RLHFError):
    """Published weights that did not arrive whole: wrong checksum, missing tensor, unexpected version."""


class NoWeightsPlan(WeightsError):
    """A learner was asked for weights before it has planned how to send them, as one that has just started."""


class CheckpointError(RLHFError):
    """A checkpoint that cannot be written, or whose bytes are not what its manifest says."""


class DiskStalled(RLHFError):
    """A file operation of the run made no progress for longer than `cluster.disk_timeout_s`: its disk hangs. Names the
    operation, the file and the seconds. Exit code 69 (EX_UNAVAILABLE), as for a lost worker: going on with --resume may
    help."""

    exit_code = 69
    retryable = True


class BackgroundTaskError(RLHFError):
    """A task that a run must not be without, such as the watch over its workers, failed again and again. Exit code 69:
    going on with --resume may help."""

    exit_code = 69
    retryable = True


class UploadError(RLHFError):
    """Copies of a run (`run.upload`) are not complete, while the run itself ended well. Exit code 74 (EX_IOERR)."""

    exit_code = 74


class BufferError(RLHFError):  # the replay buffer's own error; the builtin is about memoryviews
    """A replay-buffer operation that breaks its contract (over capacity, unknown lease, stale experience)."""


class LedgerError(RLHFError):
    """Samples that are not accounted for, or a ledger that cannot be read or written."""


class TrainingError(RLHFError):
    """Training that cannot go on: numbers that are not finite in update after update, or updates out of order."""


class WorkerError(RLHFError):
    """A worker process that died, hung past its deadline, or could not be placed; names role, rank and call. Exit code
    69 (EX_UNAVAILABLE) tells a scheduler that going on with --resume may help."""

    exit_code = 69
    retryable = True
    role: str = ""
    """Of the worker, where it is known."""

    def __init__(self, message: str, role: str = "") -> None:
        super().__init__(message)
        self.role = role


class WorkerBroken(WorkerError):
    """A worker says of itself that it lives and cannot work any more: what it runs on died. It must be restarted."""


class WorkerLost(WorkerError):
    """A call that its worker will not answer. Not the role's own error: another worker, or the next one, may answer."""

    rank: int = -1
    incarnation: int = 0
    """Which process of that rank, counted from 1."""
    method: str = ""
    kind: Literal["died", "hung", "broke", "result", "stale"] = "died"
    """The process is gone; it did not answer or made no progress in time; it says that it cannot work any more; its
    result, or an argument, is not in the object store any more; it answered after it had been given up."""
    age_s: float = 0.0
    """Seconds from the call to the end of hope."""

    def __init__(
        self, message: str, role: str = "", rank: int = -1, incarnation: int = 0, method: str = "",
        kind: Literal["died", "hung", "broke", "result", "stale"] = "died", age_s: float = 0.0,
    ) -> None:
        super().__init__(message, role)
        self.rank, self.incarnation, self.method, self.kind, self.age_s = rank, incarnation, method, kind, age_s

    @property
    def worker(self) -> str:
        """Readable name of the worker, e.g. "generator/1"."""
        return f"{self.role}/{self.rank}"


class ClusterError(RLHFError):
    """A Ray cluster that cannot be reached or has not what the configuration asks for."""


class SupersededError(RLHFError):
    """Another driver has taken over the run's directory, and this one writes nothing more there. Exit code 77
    (EX_NOPERM) is final: a run that is started again would fight with its successor."""

    exit_code = 77


class ClusterUnavailable(ClusterError):
    """A Ray cluster that does not answer, or whose head was lost. Exit code 68 (EX_NOHOST) tells a scheduler that going
    on with --resume may help, once it is there."""

    exit_code = 68
    retryable = True


class StoppedEarly(RLHFError):
    """The run ended itself before its last step, because of `early_stop`; checkpoint, model and summary are written.
    Exit code 3 tells it from a run that ended well (0) and from one that broke (1)."""

    exit_code = 3


class RunInterrupted(RLHFError):
    """The run was asked to stop and left a resumable checkpoint; exit code 75 (EX_TEMPFAIL) says so to a scheduler."""

    exit_code = 75
    retryable = True
