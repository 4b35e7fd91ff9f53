"""Workers in this process behind Ray's interface of an actor: calls reach the real `timed_call` of the role's class."""

import asyncio
from types import SimpleNamespace

from rlhf_ray.workers.actor_class import actor_class


def process_of(cls, **arguments):
    """What Ray would run, as an ordinary object."""
    return actor_class(cls).__ray_metadata__.modified_class(**arguments)


class Result:
    """Stands for a `ray.ObjectRef`: a wait for it that is given up ends neither the call nor another wait."""

    def __init__(self, task, number):
        self._task = task
        self._number = number

    async def _get(self):
        return (await asyncio.shield(self._task))[self._number]

    def __await__(self):
        return self._get().__await__()


class LocalActor:
    """Ray's handle to a worker of an asynchronous role."""

    def __init__(self, worker):
        self.worker = worker
        self._tasks = set()
        self.timed_call = SimpleNamespace(options=lambda num_returns: SimpleNamespace(
            remote=lambda spec, *values: self._begin(num_returns, spec, values)))

    def _begin(self, returns, spec, values):
        task = asyncio.get_running_loop().create_task(self.worker.timed_call(spec, *values))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return [Result(task, number) for number in range(returns)]

    def _ended(self, task):
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # nobody may wait for it
