"""What a worker process is given, and how a role's class becomes remote, before any Ray is started."""

import asyncio
import pickle

import ray

from rlhf_ray.cluster.worker_environment import KEEP_MEMORY, worker_environment
from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.config.run import PlacementConfig, PoolConfig
from rlhf_ray.workers.actor_class import actor_class, is_async
from rlhf_ray.workers.calls import CallSpec
from tests.unit.workers.local_groups import local_group


class Plain:
    """A role."""

    def double(self, x):
        return 2 * x

    def both(self, x):
        return x, -x


class Asynchronous:
    """A role that answers several at once."""

    async def double(self, x):
        await asyncio.sleep(0)
        return 2 * x

    def plain(self, x):
        return x + 1


def order(method, *args, outputs=1):
    """A call as the worker gets it."""
    return CallSpec.of(method, outputs, args)[0]


def inner(cls):
    """The class that Ray would run, as an ordinary one."""
    return actor_class(cls).__ray_metadata__.modified_class


def test_every_role_has_an_address_on_its_node_where_others_join(monkeypatch):
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    (address, _) = inner(Plain)().timed_call(order("rendezvous"))
    assert address.startswith("tcp://127.0.0.1:")


def test_roles_with_coroutines_are_told_apart():
    assert is_async(Asynchronous) and not is_async(Plain)


def test_a_remote_class_keeps_its_name():
    assert inner(Plain).__name__ == "Plain" and inner(Asynchronous).__name__ == "Asynchronous"


def test_a_call_answers_with_its_result_and_its_time():
    worker = inner(Plain)()
    result, seconds = worker.timed_call(order("double", 4))
    assert result == 8 and seconds >= 0
    first, second, _ = worker.timed_call(order("both", 4, outputs=2))
    assert (first, second) == (4, -4)
    pair, _ = worker.timed_call(order("both", 4))
    assert pair == (4, -4)


def test_arguments_arrive_in_their_order_whether_by_value_or_by_reference():
    a, b = ray.ObjectRef(b"a" * 28), ray.ObjectRef(b"b" * 28)
    values = {a: "value of a", b: "value of b"}

    def arrived(argument):
        if isinstance(argument, list):
            return [arrived(part) for part in argument]
        return values[argument] if isinstance(argument, ray.ObjectRef) else argument

    for args in ([a, 1, 2, b], [None, a, b, [3]], [1, 2], [a], [], [[a, b], 1, [], a], [[b, a]]):
        for named in ({}, {"x": a, "y": 2, "z": [b, a]}):
            spec, references = CallSpec.of("m", 1, args, named)
            given = pickle.loads(pickle.dumps(spec))
            found = CallSpec(*given).arguments([values[reference] for reference in references])
            assert found == (arrived(args), {name: arrived(value) for name, value in named.items()})


def test_the_rank_of_one_that_was_removed_is_never_given_again(monkeypatch):
    group = local_group(monkeypatch, workers=2)

    async def replace_the_last():
        await group.remove(1, "one too many")
        return await group.add(1.0)

    assert asyncio.run(replace_the_last()) == 2 and group.ranks == [0, 2] and group.incarnation(2) == 1


def test_coroutines_and_plain_methods_of_one_role_both_answer():
    worker = inner(Asynchronous)()
    assert asyncio.run(worker.timed_call(order("double", 4)))[0] == 8
    assert asyncio.run(worker.timed_call(order("plain", 4)))[0] == 5


def test_the_environment_limits_threads_and_the_roles_own_settings_win():
    given = worker_environment(PlacementConfig(threads=3), {"DS_ACCELERATOR": "cpu", "OMP_WAIT_POLICY": "active"})
    assert given["OMP_NUM_THREADS"] == "3"
    assert given["OMP_WAIT_POLICY"] == "active" and given["DS_ACCELERATOR"] == "cpu"
    assert worker_environment(PlacementConfig(), {})["OMP_WAIT_POLICY"] == "passive"


def test_a_bundle_asks_for_what_it_has_some_of():
    assert PoolConfig(cpus=1.5).bundle == {"CPU": 1.5}
    assert PoolConfig(cpus=2, gpus=1, resources={"nvme": 0.5}).bundle == {"CPU": 2, "GPU": 1, "nvme": 0.5}
    assert PoolConfig(cpus=0, gpus=1).bundle == {"GPU": 1}


def test_workers_without_gpus_keep_their_memory():
    assert KEEP_MEMORY.items() <= worker_environment(PlacementConfig(), {}).items()
    assert not KEEP_MEMORY.keys() & worker_environment(PlacementConfig(gpus=1), {}).keys()


def test_learners_that_gather_whole_weights_give_large_blocks_back():
    given = [worker_environment(LearnerConfig(zero_stage=stage), {})["MALLOC_MMAP_MAX_"] for stage in (2, 3)]
    assert given[0] == KEEP_MEMORY["MALLOC_MMAP_MAX_"] == "0" and int(given[1]) > 0
