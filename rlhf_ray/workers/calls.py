"""One call to a worker: its results stay in the object store, its inputs are references, and it has a deadline.

The caller is the driver, or another worker (`workers.peers`). A `Fence` is the caller's guard against late answers of a
process that was given up; `Caller` names the process that calls, so that the worker can refuse late calls. The driver
(`WorkerGroup`) or another worker (`PeerGroup`) makes calls through a `WorkerHandle`.
"""

import asyncio
import pickle
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, Literal, NamedTuple, Protocol, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rlhf_ray.errors import RLHFError, WorkerBroken, WorkerError, WorkerLost, first_line

Result = TypeVar("Result")
Answer = TypeVar("Answer", covariant=True)

TIMING_BYTES = 9
"""Size of a serialized float."""
GRACE_S = 1.0
"""Time that a call past its deadline gets to fetch results that exist already, perhaps on another node."""


@dataclass
class Traffic:
    """Bytes that the driver itself has received from workers. The coordinator is meant to handle references and small
    numbers only, and tests check it by this count."""

    received: int = 0


traffic = Traffic()


class Fence:
    """Guards one incarnation of a worker. Once it is closed, replies of that process are ignored and all waits for them
    end."""

    def __init__(self, incarnation: int = 1) -> None:
        self.incarnation = incarnation
        """Number of the worker's process, counted from 1 for each rank."""
        self.closed: str | None = None
        """Why the worker was given up; None while it is in use."""
        self._waiting: set[asyncio.Timeout] = set()

    def close(self, reason: str) -> None:
        """Give up the worker: pending waits end now. Call it from the event loop's thread; the first reason is kept."""
        self.closed = self.closed or reason
        for deadline in self._waiting:
            if not deadline.expired():
                deadline.reschedule(0.0)

    @contextmanager
    def around(self, deadline: asyncio.Timeout) -> Iterator[None]:
        """Let a wait end early when the worker is given up."""
        self._waiting.add(deadline)
        if self.closed is not None:
            deadline.reschedule(0.0)
        try:
            yield
        finally:
            self._waiting.discard(deadline)


class Deadline(NamedTuple):
    """How long a call may take."""

    seconds: float
    field: str = ""
    """The configuration field that sets it; empty when none does."""


class Caller(NamedTuple):
    """The worker process that makes a call."""

    role: str
    rank: int
    incarnation: int

    @property
    def worker(self) -> str:
        """Name of the worker, e.g. "episode_runner/0"."""
        return f"{self.role}/{self.rank}"


class CallSpec(NamedTuple):
    """What a worker is to do. Everything except the values passed by reference is one argument, because Ray spends time
    on each argument."""

    method: str
    outputs: int
    plain: list[Any]
    """All arguments, first those by position; None in place of each reference."""
    names: list[str]
    """Of the arguments by name, which come last."""
    places: list[tuple[int, int]]
    """Where each reference is: its argument, and its place in it if that is a list of references, else -1."""
    caller: tuple[str, int, int] | None = None
    """A `Caller`; None if it is the driver."""
    call_id: str = ""
    """By which `EndsCalls.end_call` can end the call, unique among all processes; empty if it cannot be ended."""

    @classmethod
    def of(cls, method: str, outputs: int, args: Sequence[Any], named: Mapping[str, Any] | None = None,
           caller: "Caller | None" = None, call_id: str = "") -> tuple[tuple[Any, ...], list[ray.ObjectRef]]:
        """The call as a plain tuple, which serializes faster, and the references among its arguments and in lists of
        them. Only Ray's own arguments arrive as their values."""
        named = named or {}
        plain = [*args, *named.values()]
        places: list[tuple[int, int]] = []
        refs: list[ray.ObjectRef] = []
        for i, argument in enumerate(plain):
            if isinstance(argument, ray.ObjectRef):
                places.append((i, -1))
                refs.append(argument)
                plain[i] = None
            elif isinstance(argument, list) and argument and isinstance(argument[0], ray.ObjectRef):
                places += [(i, j) for j in range(len(argument))]
                refs += argument
                plain[i] = [None] * len(argument)
        return (method, outputs, plain, list(named), places, caller and tuple(caller), call_id), refs

    def arguments(self, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """All arguments, by position and by name; `values` are those of the references."""
        arguments = list(self.plain)
        for (argument, place), value in zip(self.places, values, strict=True):
            if place < 0:
                arguments[argument] = value
            else:
                arguments[argument][place] = value
        positional = len(arguments) - len(self.names)
        return arguments[:positional], dict(zip(self.names, arguments[positional:], strict=True))


@dataclass(frozen=True)
class Call(Generic[Answer]):
    """A call in progress. Pass `ref` (or `refs`) on to other workers; await `done` or `value`."""

    role: str
    rank: int
    method: str
    refs: tuple[ray.ObjectRef, ...]
    """The call's results, owned by this process: they outlive the worker that made them."""
    timing: ray.ObjectRef
    """The seconds that the call took on the worker."""
    deadline: Deadline
    started: float
    """By the event loop's clock, `time.monotonic`."""
    fence: Fence = field(default_factory=Fence)
    """Fence of the incarnation that was called."""
    ending: "Callable[[Deadline], Call[None]] | None" = None
    """Asks the worker to end this call; None if the call does not end with its caller."""

    @property
    def worker(self) -> str:
        """Name of the worker, e.g. "policy_learner/0"."""
        return f"{self.role}/{self.rank}"

    @property
    def ref(self) -> ray.ObjectRef:
        """The first result."""
        return self.refs[0]

    async def done(self) -> float:
        """Wait for the end of the call without fetching its results; returns the seconds that it took on the worker.

        Raises:
            RLHFError: the role's own error, as raised in the worker.
            WorkerLost: the worker died, hung past the deadline or was given up, or a result no longer exists.
            WorkerError: the role raised an error of another kind.
        """
        seconds: float = await self._fetch(self.timing)
        traffic.received += TIMING_BYTES
        return seconds

    async def value(self) -> Answer:
        """Wait for the call and fetch its result into this process. Raises the same errors as `done`."""
        result: Answer = await self.output(0)
        return result

    async def output(self, index: int) -> Any:
        """As `value`, for one of several results."""
        value = await self._fetch(self.refs[index])
        traffic.received += len(pickle.dumps(value, protocol=5))
        return value

    async def end(self, within: Deadline) -> WorkerLost | None:
        """End the call at its worker because the caller is cancelled, and wait until it has ended there, even if the
        caller is cancelled again meanwhile. A call that does not end with its caller goes on.

        Args:
            within: how long to wait.

        Returns:
            the loss of the worker, if it does not answer: the call is over then, or its process must be replaced.
        """
        if self.ending is None or self.fence.closed is not None:
            return None
        ended = asyncio.ensure_future(_loss_in(self.ending(within)))
        while not ended.done():
            with suppress(asyncio.CancelledError):  # the caller raises the first one
                await asyncio.wait([ended])
        return None if ended.cancelled() else ended.result()

    async def _fetch(self, ref: ray.ObjectRef) -> Any:
        at_least = asyncio.get_running_loop().time() + GRACE_S
        try:
            async with asyncio.timeout_at(max(self.started + self.deadline.seconds, at_least)) as limit:
                with self.fence.around(limit):
                    value = await ref
        except RayTaskError as error:
            raise self._as_our_error(error) from error
        except RayActorError as error:
            raise self._lost("died", f"{self.worker} died in {self.method}: {first_line(error)}") from error
        except RayError as error:
            raise self._lost("result", f"the result of {self.method} of {self.worker} was lost: "
                             f"{first_line(error)}") from error
        except TimeoutError:
            seconds, field = self.deadline
            raise self._lost("hung", f"{self.worker} did not answer {self.method} within {seconds:g} s"
                             + (f" ({field})" if field else "")) from None
        if self.fence.closed is not None:
            raise self._lost("stale", "")
        return value

    def _lost(self, kind: Literal["died", "hung", "broke", "result", "stale"], message: str) -> WorkerLost:
        """The error to raise. For a worker that was given up earlier, it states that reason."""
        age_s = time.monotonic() - self.started
        if self.fence.closed is not None:
            kind = "stale"
            message = (f"{self.worker} was given up while {self.method} was under way for {age_s:.1f} s: "
                       f"{self.fence.closed}")
        return WorkerLost(message, self.role, self.rank, self.fence.incarnation, self.method, kind, age_s)

    def _as_our_error(self, error: RayTaskError) -> RLHFError:
        cause: BaseException = error
        while isinstance(cause, RayTaskError) and cause.cause is not None and cause.cause is not cause:
            cause = cause.cause
        if isinstance(cause, WorkerBroken):
            return self._lost("broke", str(cause))
        if isinstance(cause, RLHFError):
            return cause
        if isinstance(cause, RayError) and not isinstance(cause, RayTaskError):
            return self._lost("result", f"an argument of {self.method} of {self.worker} was lost: {first_line(cause)}")
        message = f"{self.worker} failed in {self.method}: {type(cause).__name__}: {cause}\n{error}"
        return WorkerError(message, self.role)


async def _loss_in(call: Call[None]) -> WorkerLost | None:
    """The loss of the worker that a call meets, if any."""
    try:
        await call.done()
    except WorkerLost as error:
        if (error.role, error.rank) == (call.role, call.rank) and error.kind in ("died", "hung", "broke"):
            return error
    except RLHFError:  # the worker's own error, which another call will meet
        pass
    return None


class EndsCalls(Protocol):
    """Every worker with asynchronous methods (`workers.actor_class.Process`)."""

    def end_call(self, call_id: str) -> Coroutine[Any, Any, None]:
        """End the call with this id; returns when it has ended."""


class Startable(Protocol):
    """A role: an ordinary class without knowledge of Ray, which can be started."""

    def start(self, *args: Any) -> Any:
        """Load what the role needs."""


Role = TypeVar("Role", bound=Startable, covariant=True)
Method = Callable[Concatenate[Role, ...], Result]
"""A method of a role's class, as in `Generator.wake`. A worker calls its own method of that name, which may be that of
a subclass."""
AsyncMethod = Callable[Concatenate[Role, ...], Coroutine[Any, Any, Result]]


class WorkerHandle:
    """One process of a rank, until it is given up: then its `fence` is closed, and all its answers are refused."""

    def __init__(self, role: str, rank: int, actor: Any, fence: Fence, caller: Caller | None = None) -> None:
        """
        Args:
            actor: Ray's handle.
            caller: this process; None if it is the driver.
        """
        self.role = role
        self.rank = rank
        self.actor = actor
        self.fence = fence
        self._caller = caller
        self._methods: dict[int, Any] = {}

    def call(self, method: Callable[..., Result], *args: Any, deadline: Deadline, outputs: int = 1,
             ends_with_caller: bool = False, **named: Any) -> Call[Result]:
        """Begin a call. Object references among the arguments, and in lists of references, arrive as their values.

        Args:
            method: of the role's class, or of `Process`.
            outputs: how many values the method returns as a tuple, each of which becomes an object of its own.
            ends_with_caller: `Call.end` ends the call at the worker, whose method is asynchronous.
        """
        name = method.__name__
        call_id = uuid.uuid4().hex if ends_with_caller else ""
        spec, references = CallSpec.of(name, outputs, args, named, self._caller, call_id)
        *refs, timing = self._timed_call(outputs + 1).remote(spec, *references)

        def end(within: Deadline) -> Call[Any]:
            return self.call(EndsCalls.end_call, call_id, deadline=within)

        return Call(self.role, self.rank, name, tuple(refs), timing, deadline, time.monotonic(), self.fence,
                    end if ends_with_caller else None)

    def _timed_call(self, returns: int) -> Any:
        """The worker's one remote method, which `workers.actor_class.actor_class` defines: it calls the role's method
        by its name. Ray checks its options only once."""
        if returns not in self._methods:
            self._methods[returns] = self.actor.timed_call.options(num_returns=returns)
        return self._methods[returns]
