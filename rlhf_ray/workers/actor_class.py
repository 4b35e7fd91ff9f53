"""A role's class as a Ray actor class: how a call is encoded and timed, and the environment of the worker process."""

import gc
import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import ray

from rlhf_ray.cluster.processes import PLAIN_PYTHON, Processes, own_processes
from rlhf_ray.config.run import PlacementConfig
from rlhf_ray.workers import heartbeat

KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Environment of workers on CPUs: the C library keeps freed memory, and asks for large pages. Every optimizer step and
every publication of weights needs the memory again that the previous one freed. Taking these pages from the kernel and
returning them costs several times as much as a copy into them: a seventh of a small model's update. (glibc's
mallopt(3), and its manual's "Memory Allocation Tunables")"""
GIVE_BACK_LARGE = {**KEEP_MEMORY, "MALLOC_MMAP_MAX_": str(1 << 16), "MALLOC_MMAP_THRESHOLD_": str(8 << 20)}
"""The same, except that blocks of 8 MiB and more are taken from the kernel and returned to it. Under ZeRO-3 whole
weights are allocated and freed in a different order in each pass; kept memory fragments, and reached twice what is in
use at a time."""


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

    @classmethod
    def of(cls, method: str, outputs: int, args: Sequence[Any],
           named: Mapping[str, Any] | None = None) -> tuple[tuple[Any, ...], list[ray.ObjectRef]]:
        """The call as a plain tuple, which serializes faster, and the references among its arguments and in lists of
        them. Only Ray's own arguments arrive as their values."""
        named = named or {}
        plain, places, refs = [*args, *named.values()], [], []
        for i, argument in enumerate(plain):
            if isinstance(argument, ray.ObjectRef):
                places.append((i, -1))
                refs.append(argument)
                plain[i] = None
            elif isinstance(argument, list) and argument and isinstance(argument[0], ray.ObjectRef):
                places += [(i, j) for j in range(len(argument))]
                refs += argument
                plain[i] = [None] * len(argument)
        return tuple(cls(method, outputs, plain, list(named), places)), refs

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


class Process:
    """What every worker answers besides the methods of its role: about its process and its node."""

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

    if is_async(cls):

        async def timed_call(self: Any, spec: tuple[Any, ...], *values: Any) -> tuple[Any, ...]:
            began, call = time.perf_counter(), CallSpec(*spec)
            arguments, named = call.arguments(values)
            with gc_paused_for_start(call.method):
                result = getattr(self, call.method)(*arguments, **named)
                return outcome(await result if inspect.isawaitable(result) else result, call.outputs, began)
    else:

        def timed_call(self: Any, spec: tuple[Any, ...], *values: Any) -> tuple[Any, ...]:  # type: ignore[misc]
            began, call = time.perf_counter(), CallSpec(*spec)
            arguments, named = call.arguments(values)
            with gc_paused_for_start(call.method):
                return outcome(getattr(self, call.method)(*arguments, **named), call.outputs, began)

    members = {"timed_call": timed_call, "__doc__": cls.__doc__}
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


def worker_environment(placement: PlacementConfig, more: Mapping[str, str]) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(placement.threads),
        "OMP_WAIT_POLICY": "passive",  # a spinning thread takes the core from a worker that has work
        "TOKENIZERS_PARALLELISM": "false",
        **_memory(placement),
        **PLAIN_PYTHON,
        "PYTHONDONTWRITEBYTECODE": "",  # without bytecode every start of a worker compiles torch and vLLM again
        **more,
    }


def _memory(placement: PlacementConfig) -> dict[str, str]:
    if placement.gpus:
        return {}
    return GIVE_BACK_LARGE if placement.is_sharded else KEEP_MEMORY
