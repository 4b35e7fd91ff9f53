"""One call to a worker: what it returns stays in the object store, what it took comes back, and it has a deadline."""

import asyncio
import pickle
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rlhf_ray.errors import RLHFError, WorkerError


@dataclass(frozen=True)
class Timing:
    """What the worker says about a call it has finished."""

    seconds: float


TIMING_BYTES = len(pickle.dumps(Timing(1 / 3), protocol=5))
GRACE_S = 1.0
"""What a call past its deadline gets to hand over results that are there, perhaps from another node."""


@dataclass
class Traffic:
    """Bytes the driver itself has received from workers: what the promise "references and small numbers" is about."""

    received: int = 0


traffic = Traffic()


@dataclass(frozen=True)
class Call:
    """A call under way. Pass `ref` (or `refs`) on to other workers; await `done` or `value`."""

    role: str
    rank: int
    method: str
    refs: tuple[ray.ObjectRef, ...]
    """The call's results, owned by this process: they outlive the worker that made them."""
    timing: ray.ObjectRef
    timeout_s: float
    started: float
    """By the event loop's clock, which is `time.monotonic`."""

    @property
    def worker(self) -> str:
        """Readable name of the worker, e.g. "policy_learner/0"."""
        return f"{self.role}/{self.rank}"

    @property
    def ref(self) -> ray.ObjectRef:
        """The (first) result."""
        return self.refs[0]

    async def done(self) -> Timing:
        """Wait for the call to end without fetching its results.

        Raises:
            RLHFError: the role's own error, as raised in the worker.
            WorkerError: the worker died, hung past the deadline, or failed in a way it has no words for.
        """
        timing: Timing = await self._fetch(self.timing)
        traffic.received += TIMING_BYTES
        return timing

    async def value(self, index: int = 0) -> Any:
        """Wait for the call and fetch one result into this process; same errors as `done`."""
        value = await self._fetch(self.refs[index])
        traffic.received += len(pickle.dumps(value, protocol=5))
        return value

    async def _fetch(self, ref: ray.ObjectRef) -> Any:
        at_least = asyncio.get_running_loop().time() + GRACE_S
        try:
            async with asyncio.timeout_at(max(self.started + self.timeout_s, at_least)):
                return await ref
        except RayTaskError as error:
            raise self._told_by_worker(error) from error
        except RayActorError as error:
            raise WorkerError(f"{self.worker} died in {self.method}: {_first_line(error)}") from error
        except RayError as error:
            raise WorkerError(f"the result of {self.method} of {self.worker} was lost: {_first_line(error)}") from error
        except TimeoutError:
            raise WorkerError(f"{self.worker} did not answer {self.method} within {self.timeout_s:g} s "
                              "(cluster.call_timeout_s)") from None

    def _told_by_worker(self, error: RayTaskError) -> RLHFError:
        cause: BaseException = error
        while isinstance(cause, RayTaskError) and cause.cause is not None and cause.cause is not cause:
            cause = cause.cause
        if isinstance(cause, RLHFError):
            return cause
        return WorkerError(f"{self.worker} failed in {self.method}: {type(cause).__name__}: {cause}\n{error}")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
