"""A handle to one worker process, with which this process calls it: the driver (`WorkerGroup`) or another worker
(`PeerGroup`)."""

import time
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Protocol, TypeVar

from rlhf_ray.workers.calls import Call, Caller, CallSpec, Deadline, Fence, Result


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
             **named: Any) -> Call[Result]:
        """Begin a call. Object references among the arguments, and in lists of references, arrive as their values.

        Args:
            method: of the role's class, or of `Process`.
            outputs: how many values the method returns as a tuple, each of which becomes an object of its own.
        """
        name = method.__name__
        spec, references = CallSpec.of(name, outputs, args, named, self._caller)
        *refs, timing = self._timed_call(outputs + 1).remote(spec, *references)
        return Call(self.role, self.rank, name, tuple(refs), timing, deadline, time.monotonic(), self.fence)

    def _timed_call(self, returns: int) -> Any:
        """The worker's one remote method, which `workers.actor_class.actor_class` defines: it calls the role's method
        by its name. Ray checks its options only once."""
        if returns not in self._methods:
            self._methods[returns] = self.actor.timed_call.options(num_returns=returns)
        return self._methods[returns]
