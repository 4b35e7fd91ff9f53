"""While a role starts, the garbage collector rests; afterwards it works as before, and leaves the imports alone."""

import gc

import pytest

from rlhf_ray.workers.actor_class import gc_paused_for_start


def test_nothing_is_collected_while_a_role_starts_and_what_it_left_is_frozen():
    frozen = gc.get_freeze_count()
    try:
        with gc_paused_for_start("start"):
            assert not gc.isenabled()
            left = [[] for _ in range(1000)]
        assert gc.isenabled() and gc.get_freeze_count() >= frozen + len(left)
    finally:
        gc.unfreeze()


def test_the_collector_works_again_after_a_start_that_failed():
    try:
        with pytest.raises(RuntimeError), gc_paused_for_start("start"):
            raise RuntimeError
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_calls_after_the_start_are_left_alone():
    with gc_paused_for_start("update"):
        assert gc.isenabled()
