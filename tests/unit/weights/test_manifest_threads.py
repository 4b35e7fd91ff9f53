"""Passes over a bucket's bytes on several threads: the same results, in order."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlhf_ray.weights import manifest as module
from rlhf_ray.weights.manifest import in_parallel


@pytest.fixture
def pool(monkeypatch):
    """A pool whose threads' names begin with "pool"."""
    with ThreadPoolExecutor(3, "pool") as executor:
        monkeypatch.setattr(module, "_threads", lambda: executor)
        yield


def name_after(seconds):
    time.sleep(seconds)
    return threading.current_thread().name.partition("_")[0]


@pytest.mark.parametrize(("nbytes", "where"), [(module.WORTH_IT, "pool"), (module.WORTH_IT - 1, "MainThread")])
def test_a_small_bucket_stays_on_the_calling_thread(pool, nbytes, where):
    assert list(in_parallel(name_after, [0.0, 0.0], nbytes=nbytes)) == [where] * 2


def test_results_keep_the_order_of_the_arguments(pool):
    waits = [0.05, 0.0, 0.02]
    assert list(in_parallel(lambda wait, number: (time.sleep(wait), number)[1], waits, [1, 2, 3],
                            nbytes=module.WORTH_IT)) == [1, 2, 3]


def test_of_two_errors_the_first_by_order_is_raised(pool):
    def fail(wait, name):
        time.sleep(wait)
        raise ValueError(name)

    with pytest.raises(ValueError, match="first"):
        list(in_parallel(fail, [0.05, 0.0], ["first", "second"], nbytes=module.WORTH_IT))


@pytest.mark.parametrize(("cpus", "number"), [(1, None), (2, None), (3, None), (4, 2), (16, 8), (128, 8)])
def test_there_is_a_thread_for_every_second_cpu_that_the_process_may_use(monkeypatch, cpus, number):
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: set(range(cpus)))
    executor = module._threads.__wrapped__()
    assert (executor and executor._max_workers) == number
