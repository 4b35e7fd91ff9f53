"""One call to a worker: what it returns stays in the object store, what it took comes back, and it has a deadline."""

import asyncio
import pickle
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rlhf_ray.errors import RLHFError, WorkerError


@dataclass(frozen=True)
class Timing:
    """What the worker says about a call it has finished."""

    seconds: float


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
        return await self._fetch(self.timing)

    async def value(self, index: int = 0) -> Any:
        """Wait for the call and fetch one result into this process; same errors as `done`."""
        return await self._fetch(self.refs[index])

    async def _fetch(self, ref: ray.ObjectRef) -> Any:
        left = self.timeout_s - (time.monotonic() - self.started)
        try:
            value = await asyncio.wait_for(_as_future(ref), max(left, 0.001))
        except TimeoutError:
            raise WorkerError(f"{self.worker} did not answer {self.method} within {self.timeout_s:g} s "
                              "(cluster.call_timeout_s)") from None
        except RayTaskError as error:
            raise self._told_by_worker(error) from error
        except RayActorError as error:
            raise WorkerError(f"{self.worker} died in {self.method}: {_first_line(error)}") from error
        except RayError as error:
            raise WorkerError(f"the result of {self.method} of {self.worker} was lost: {_first_line(error)}") from error
        traffic.received += len(pickle.dumps(value, protocol=5))
        return value

    def _told_by_worker(self, error: RayTaskError) -> RLHFError:
        cause: BaseException = error
        while isinstance(cause, RayTaskError) and cause.cause is not None and cause.cause is not cause:
            cause = cause.cause
        if isinstance(cause, RLHFError):
            return cause
        return WorkerError(f"{self.worker} failed in {self.method}: {type(cause).__name__}: {cause}\n{error}")


async def _as_future(ref: ray.ObjectRef) -> Any:
    return await ref


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
