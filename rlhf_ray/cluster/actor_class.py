"""A role's class as a Ray actor class: how a call travels, what is timed, and the environment of its process."""

import gc
import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import ray

from rlhf_ray.cluster.beat import introduce
from rlhf_ray.cluster.processes import own_processes
from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.config.run import PlacementConfig

KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""The C library keeps what is freed, and asks for large pages. Every optimizer step and every publication of weights
needs again what the one before let go: to have the kernel take and give the pages costs several times as much as a copy
into them, a seventh of a small model's update. (glibc's mallopt(3), and its manual's "Memory Allocation Tunables")"""
GIVE_BACK_LARGE = {**KEEP_MEMORY, "MALLOC_MMAP_MAX_": str(1 << 16), "MALLOC_MMAP_THRESHOLD_": str(8 << 20)}
"""The same, but blocks of 8 MiB and more come from the kernel and go back to it. Under ZeRO-3 whole weights come and go
in another order at each pass; what is kept of them breaks into pieces, and twice what is in use at a time was held."""


class CallSpec(NamedTuple):
    """What a worker is to do. All but the values that come by reference travels as one argument, since Ray takes its
    time for each."""

    method: str
    outputs: int
    plain: list[Any]
    """Arguments that are no references."""
    places: list[int]
    """Of those that are, among all."""

    @classmethod
    def of(cls, method: str, outputs: int, args: Sequence[Any]) -> tuple[Any, ...]:
        """The order, as a plain tuple, which is written down faster."""
        places = [i for i, arg in enumerate(args) if isinstance(arg, ray.ObjectRef)]
        return tuple(cls(method, outputs, [arg for arg in args if not isinstance(arg, ray.ObjectRef)], places))

    def arguments(self, values: Sequence[Any]) -> list[Any]:
        """All arguments in their order; `values` are those that the references stood for."""
        arguments = list(self.plain)
        for place, value in zip(self.places, values, strict=True):
            arguments.insert(place, value)
        return arguments


def is_async(cls: type) -> bool:
    return any(inspect.iscoroutinefunction(f) for _, f in inspect.getmembers(cls, inspect.isfunction))


def actor_class(cls: type) -> Any:
    """The role's class as a Ray actor class of the same name, with one method that times the role's own."""

    def outcome(result: Any, outputs: int, began: float) -> tuple[Any, ...]:
        seconds = time.perf_counter() - began
        return (*result, seconds) if outputs > 1 else (result, seconds)

    if is_async(cls):

        async def timed_call(self: Any, spec: tuple[Any, ...], *values: Any) -> tuple[Any, ...]:
            began, asked = time.perf_counter(), CallSpec(*spec)
            with gc_paused_for_start(asked.method):
                result = getattr(self, asked.method)(*asked.arguments(values))
                return outcome(await result if inspect.isawaitable(result) else result, asked.outputs, began)
    else:

        def timed_call(self: Any, spec: tuple[Any, ...], *values: Any) -> tuple[Any, ...]:  # type: ignore[misc]
            began, asked = time.perf_counter(), CallSpec(*spec)
            with gc_paused_for_start(asked.method):
                return outcome(getattr(self, asked.method)(*asked.arguments(values)), asked.outputs, began)

    members = {"timed_call": timed_call, "node_host": _node_host, "introduce": introduce,
               "own_processes": lambda _: own_processes(), "__doc__": cls.__doc__}
    return ray.remote(type(cls.__name__, (cls,), members))


@contextmanager
def gc_paused_for_start(method: str) -> Iterator[None]:
    """While a role starts, keep the garbage collector from the libraries that it imports (a sixth of the time), and for
    good from what they leave behind, which is no garbage. Other methods run as they are."""
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


def _node_host(_: Any) -> str:
    """Address by which other nodes of the cluster reach the worker's node."""
    return ray.util.get_node_ip_address()


def worker_environment(placement: PlacementConfig, more: Mapping[str, str]) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(placement.threads),
        "OMP_WAIT_POLICY": "passive",  # a thread that spins for work takes the core from the worker that has some
        "TOKENIZERS_PARALLELISM": "false",
        **_memory(placement),
        "PYTHONDONTWRITEBYTECODE": "",  # without bytecode every start of a worker compiles torch and vLLM anew
        **more,
    }


def _memory(placement: PlacementConfig) -> dict[str, str]:
    if placement.gpus:
        return {}
    return GIVE_BACK_LARGE if isinstance(placement, LearnerConfig) and placement.zero_stage == 3 else KEEP_MEMORY
