"""A role's class as a Ray actor class: how a call is answered and timed, and which callers are refused."""

import asyncio
import gc
import inspect
import time
from collections import OrderedDict
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import ray

from rlhf_ray.cluster.processes import Processes, own_processes
from rlhf_ray.errors import WorkerError, WorkerLost
from rlhf_ray.workers import heartbeat
from rlhf_ray.workers.calls import Caller, CallSpec
from rlhf_ray.workers.peers import PeerGroup, PeerReport, PeerTable

MOST_CALLS = 10_000
"""Calls that a worker with asynchronous methods has at a time; Ray lets further ones wait, also those that would end
others. More than the open episodes of a run, each of which has one call at a generator. No more can be on their way, so
of the ids of calls that were ended before the worker had them it remembers so many."""


class CallerFence:
    """Refuses calls of other workers' processes that were given up, at the worker that they call.

    The numbers of a rank's processes grow, so it suffices to know the newest one. A worker that has not heard of a
    caller accepts it: the driver tells it of callers that were given up before these get its handle.
    """

    def __init__(self) -> None:
        self._newest: dict[tuple[str, int], int] = {}
        """Incarnation by role and rank."""
        self._under_way: dict[tuple[str, int], set[tuple[int, asyncio.Task[Any]]]] = {}
        """By role and rank, the calls that can be cancelled, with the incarnation of their caller."""

    def refuse_before(self, caller: Caller) -> None:
        """From now on refuse processes before this one, and cancel their calls under way."""
        rank = (caller.role, caller.rank)
        if caller.incarnation <= self._newest.get(rank, 0):
            return
        self._newest[rank] = caller.incarnation
        for incarnation, task in self._under_way.get(rank, ()):
            if incarnation < caller.incarnation:
                task.cancel()

    def require(self, caller: Caller, method: str) -> None:
        """
        Raises:
            WorkerLost: the caller's process was given up. It names the caller, and not this worker.
        """
        self.refuse_before(caller)
        newest = self._newest[caller.role, caller.rank]
        if caller.incarnation < newest:
            raise WorkerLost(
                f"{caller.worker} calls {method} from its process {caller.incarnation}, which was given up (the "
                f"newest is {newest})", caller.role, caller.rank, caller.incarnation, method, "stale")

    @contextmanager
    def around(self, caller: Caller, method: str) -> Iterator[None]:
        """Surrounds a call that ends early when its caller is given up. Raises the same errors as `require`."""
        self.require(caller, method)
        task = asyncio.current_task()
        assert task is not None
        calls = self._under_way.setdefault((caller.role, caller.rank), set())
        calls.add((caller.incarnation, task))
        try:
            yield
        except asyncio.CancelledError:
            self.require(caller, method)
            raise
        finally:
            calls.discard((caller.incarnation, task))


class EndableCalls:
    """The calls of a worker that end with their callers."""

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Task[Any]] = {}
        self._cancelled: set[str] = set()
        """Of the calls under way."""
        self._ended: OrderedDict[str, None] = OrderedDict()
        """Ids of calls that were to be ended when the worker did not have them, because they had ended, or are still on
        their way; of more than `MOST_CALLS` the oldest are forgotten."""

    @contextmanager
    def around(self, call_id: str, method: str) -> Iterator[None]:
        """Surrounds a call that ends early when its caller is cancelled.

        Raises:
            WorkerError: its caller was cancelled.
        """
        if call_id in self._ended:
            raise WorkerError(f"a call of {method} arrived after its caller was cancelled")
        task = asyncio.current_task()
        assert task is not None
        self._under_way[call_id] = task
        try:
            yield
        except asyncio.CancelledError:
            if call_id in self._cancelled:
                raise WorkerError(f"a call of {method} ended because its caller was cancelled") from None
            raise
        finally:
            del self._under_way[call_id]
            self._cancelled.discard(call_id)

    async def end(self, call_id: str) -> None:
        """Cancel a call, and wait until it has ended. One that arrives later is refused."""
        task = self._under_way.get(call_id)
        if task is None:
            self._ended[call_id] = None
            if len(self._ended) > MOST_CALLS:
                self._ended.popitem(last=False)
            return
        if call_id not in self._cancelled:  # a second one would interrupt what it does to end
            self._cancelled.add(call_id)
            task.cancel()
        await asyncio.wait([task])


class Process:
    """What every worker answers besides the methods of its role: about its process, its node, its calls and its
    peers."""

    caller_fence: CallerFence
    endable_calls: EndableCalls
    peer_groups: Mapping[str, PeerGroup[Any]]
    """The arguments of the role that are groups of peers, by the role of the peers."""

    def refuse_callers_before(self, caller: Caller) -> None:
        """Refuse the calls of a rank's processes before this one, which were given up."""
        self.caller_fence.refuse_before(Caller(*caller))

    def end_call(self, call_id: str) -> Coroutine[Any, Any, None]:
        """End the call with this id; returns when it has ended. (A method declared `async` would make every role an
        asynchronous actor of Ray.)"""
        return self.endable_calls.end(call_id)

    def update_peers(self, role: str, table: PeerTable) -> None:
        """Take over a table about the peers of a role."""
        self.peer_groups[role].update(table)

    def report_peers(self, role: str, wait_s: float) -> Coroutine[Any, Any, PeerReport]:
        """See `PeerGroup.report`; declared as `end_call`."""
        return self.peer_groups[role].report(wait_s)

    def rendezvous(self) -> str:
        """An address on the worker's node at which other ranks can join this one."""
        from rlhf_ray.engine.distributed import free_address

        return free_address(ray.util.get_node_ip_address())

    def introduce(self, key: str) -> Processes:
        """The worker's processes. From now on its heartbeat counts at `key`."""
        heartbeat.begin(key)
        return own_processes()

    def own_processes(self) -> Processes:
        """The worker's processes."""
        return own_processes()


def is_async(cls: type) -> bool:
    return any(inspect.iscoroutinefunction(f) for _, f in inspect.getmembers(cls, inspect.isfunction))


def actor_class(cls: type) -> Any:
    """The role's class as a Ray actor class of the same name, with added methods: one that calls and times the role's
    own, and some about the worker's process and node."""

    def outcome(result: Any, outputs: int, began: float) -> tuple[Any, ...]:
        seconds = time.perf_counter() - began
        return (*result, seconds) if outputs > 1 else (result, seconds)

    def initialise(self: Any, *args: Any, **named: Any) -> None:
        cls.__init__(self, *args, **named)  # type: ignore[misc]
        self.caller_fence = CallerFence()
        self.endable_calls = EndableCalls()
        groups = [argument for argument in (*args, *named.values()) if isinstance(argument, PeerGroup)]
        self.peer_groups = {group.role: group for group in groups}
        if len(groups) > len(self.peer_groups):
            raise TypeError(f"{cls.__name__} has several peer groups of one role; give it one of each")

    # Ray compares arguments with the signature before it starts a process.
    initialise.__signature__ = inspect.signature(cls.__init__)  # type: ignore[attr-defined, misc]

    if is_async(cls):

        async def timed_call(self: Any, spec: tuple[Any, ...], *values: Any) -> tuple[Any, ...]:
            began = time.perf_counter()
            call = CallSpec(*spec)
            with ExitStack() as ways_to_end:
                if call.caller is not None:
                    ways_to_end.enter_context(self.caller_fence.around(Caller(*call.caller), call.method))
                if call.call_id:
                    ways_to_end.enter_context(self.endable_calls.around(call.call_id, call.method))
                return outcome(await answer(self, call, values), call.outputs, began)

        async def answer(self: Any, call: CallSpec, values: tuple[Any, ...]) -> Any:
            arguments, named = call.arguments(values)
            with gc_paused_for_start(call.method):
                result = getattr(self, call.method)(*arguments, **named)
                return await result if inspect.isawaitable(result) else result
    else:

        def timed_call(self: Any, spec: tuple[Any, ...], *values: Any) -> tuple[Any, ...]:  # type: ignore[misc]
            began = time.perf_counter()
            call = CallSpec(*spec)
            if call.caller is not None:
                self.caller_fence.require(Caller(*call.caller), call.method)
            if call.call_id:
                raise TypeError(f"{cls.__name__}.{call.method} cannot end with its caller: {cls.__name__} has no "
                                "asynchronous method, and would answer `end_call` after it")
            arguments, named = call.arguments(values)
            with gc_paused_for_start(call.method):
                return outcome(getattr(self, call.method)(*arguments, **named), call.outputs, began)

    members = {"__init__": initialise, "timed_call": timed_call, "__doc__": cls.__doc__}
    return ray.remote(type(cls.__name__, (Process, cls), members))


@contextmanager
def gc_paused_for_start(method: str) -> Iterator[None]:
    """While a role starts, keep the garbage collector off the libraries that it imports (a sixth of the time), and
    afterwards permanently off the objects that they create. Other methods run unchanged."""
    if method != "start":
        yield
        return
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collecting:
            gc.enable()
