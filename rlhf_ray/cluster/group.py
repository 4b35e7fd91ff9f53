"""Plain classes made remote: the workers of one role, spawned into their pool, called one by one or together."""

import asyncio
import gc
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf_ray.cluster.calls import Call, Timing
from rlhf_ray.cluster.pools import Pools
from rlhf_ray.config.run import PlacementConfig


class WorkerGroup:
    """All workers of one role. A role is an ordinary class that knows nothing of Ray."""

    def __init__(
        self,
        role: str,
        cls: type,
        placement: PlacementConfig,
        pools: Pools,
        arguments: Callable[[int], Mapping[str, Any]],
        environment: Mapping[str, str],
        call_timeout_s: float,
    ) -> None:
        """Spawn the workers. Returns at once; `call_all("start")` is the first thing that waits for them.

        Args:
            role: name in the dashboard; workers are called `role/rank`.
            cls: the role's class.
            arguments: keyword arguments of the class for each rank.
            environment: variables of the worker processes, set before they import anything.
        """
        self.role = role
        self.call_timeout_s = call_timeout_s
        self._handles = [
            _actor_class(cls)
            .options(
                name=f"{role}/{rank}",
                num_cpus=placement.cpus,
                num_gpus=placement.gpus,
                max_concurrency=1000 if _is_async(cls) else 1,
                enable_task_events=False,  # a quarter of the driver's bytes; `under_way` of the step clock says as much
                scheduling_strategy=PlacementGroupSchedulingStrategy(pools.group(placement.pool)),
                runtime_env={"env_vars": _environment(placement, environment)},
            )
            .remote(**arguments(rank))
            for rank in range(placement.workers)
        ]
        self._methods: dict[tuple[int, int], Any] = {}

    def __len__(self) -> int:
        return len(self._handles)

    def call(self, rank: int, method: str, *args: Any, outputs: int = 1, timeout_s: float | None = None) -> Call:
        """Call one worker. Object references among `args` arrive as their values; results stay in the store.

        Args:
            outputs: how many values the method returns as a tuple, each to become an object of its own.
            timeout_s: deadline, where it is another than the group's.
        """
        *refs, timing = self._timed_call(rank, outputs + 1).remote(method, outputs, *args)
        return Call(self.role, rank, method, tuple(refs), timing, timeout_s or self.call_timeout_s, time.monotonic())

    def _timed_call(self, rank: int, returns: int) -> Any:
        """The worker's one method, with options that Ray checks but once."""
        if (rank, returns) not in self._methods:
            self._methods[rank, returns] = self._handles[rank].timed_call.options(num_returns=returns)
        return self._methods[rank, returns]

    def call_all(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Call]:
        """The same call to every worker, in rank order."""
        return [self.call(rank, method, *args, timeout_s=timeout_s) for rank in range(len(self))]

    async def values(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """The same call to every worker; their results in rank order. The first failure is raised."""
        calls = self.call_all(method, *args, timeout_s=timeout_s)
        return list(await asyncio.gather(*(call.value() for call in calls)))

    def kill(self) -> None:
        """End the worker processes now."""
        for handle in self._handles:
            ray.kill(handle)


def _is_async(cls: type) -> bool:
    return any(inspect.iscoroutinefunction(f) for _, f in inspect.getmembers(cls, inspect.isfunction))


def _actor_class(cls: type) -> Any:
    """The role's class as a Ray actor class of the same name, with one method that times the role's own."""

    def outcome(result: Any, outputs: int, began: float) -> tuple[Any, ...]:
        timing = Timing(time.perf_counter() - began)
        return (*result, timing) if outputs > 1 else (result, timing)

    if _is_async(cls):

        async def timed_call(self: Any, method: str, outputs: int, *args: Any) -> tuple[Any, ...]:
            began = time.perf_counter()
            with imports_spared(method):
                result = getattr(self, method)(*args)
                return outcome(await result if inspect.isawaitable(result) else result, outputs, began)
    else:

        def timed_call(self: Any, method: str, outputs: int, *args: Any) -> tuple[Any, ...]:  # type: ignore[misc]
            began = time.perf_counter()
            with imports_spared(method):
                return outcome(getattr(self, method)(*args), outputs, began)

    members = {"timed_call": timed_call, "node_host": _node_host, "__doc__": cls.__doc__}
    return ray.remote(type(cls.__name__, (cls,), members))


@contextmanager
def imports_spared(method: str) -> Iterator[None]:
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


def _environment(placement: PlacementConfig, more: Mapping[str, str]) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(placement.threads),
        "OMP_WAIT_POLICY": "passive",  # a thread that spins for work takes the core from the worker that has some
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONDONTWRITEBYTECODE": "",  # without bytecode every start of a worker compiles torch and vLLM anew
        **more,
    }
