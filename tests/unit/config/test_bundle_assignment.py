"""Workers in bundles: spread where that leaves room, packed where it must be, and never over what a bundle has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_ray.config.bundle_assignment import Bundles, assigned
from rlhf_ray.config.generation import GenerationConfig
from rlhf_ray.config.run import PlacementConfig, PoolConfig
from rlhf_ray.errors import ConfigError


def place(workers=1, cpus=0.0, gpus=0.0):
    return PlacementConfig(workers=workers, cpus=cpus, gpus=gpus)


def assignments(pool, **roles):
    found = assigned(pool, roles)
    assert isinstance(found, Bundles)
    return {f"{role}/{rank}": number for (role, rank), number in found.assignments.items()}


def test_the_workers_of_a_role_are_spread_over_the_bundles():
    found = assignments(PoolConfig(bundles=2, cpus=4), policy=place(2, 1), critic=place(2, 1))
    assert found == {"policy/0": 0, "policy/1": 1, "critic/0": 0, "critic/1": 1}


def test_where_spreading_leaves_no_room_for_others_workers_are_packed():
    # Spread, the two of 3 would leave 3 in each bundle: room for two of the three of 2.
    found = assignments(PoolConfig(bundles=2, cpus=6), policy=place(2, 3), reward=place(3, 2))
    assert [found[f"policy/{rank}"] for rank in range(2)] == [0, 0]
    assert [found[f"reward/{rank}"] for rank in range(3)] == [1, 1, 1]


def test_a_tensor_parallel_engine_lives_in_one_bundle_that_has_all_its_gpus():
    generator = GenerationConfig(cpus=1, gpus=4, tensor_parallel=4)
    found = assignments(PoolConfig(bundles=2, cpus=4, gpus=4), generator=generator, policy=place(4, 0.5, 1))
    assert found["generator/0"] == 0 and {found[f"policy/{rank}"] for rank in range(4)} == {1}


def test_who_finds_no_bundle_is_named_by_its_placement():
    large = place(1, 3)
    assert assigned(PoolConfig(bundles=2, cpus=2), {"small": place(1, 1), "large": large}) is large


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0.0, 0.1, 0.3, 1.0, 2.5])), max_size=5),
       st.integers(1, 4), st.sampled_from([1.0, 2.5, 4.0]))
def test_no_bundle_holds_more_than_it_has(roles, bundles, cpus):
    placements = {f"role{i}": place(workers, share) for i, (workers, share) in enumerate(roles)}
    found = assigned(PoolConfig(bundles=bundles, cpus=cpus), placements)
    if isinstance(found, Bundles):
        used = [0.0] * bundles
        for (role, _), number in found.assignments.items():
            used[number] += placements[role].cpus
        assert max(used) <= cpus + 1e-5
        assert len(found.assignments) == sum(p.workers for p in placements.values())


def test_a_share_that_is_given_back_can_be_taken_again():
    bundles = Bundles(PoolConfig(bundles=1, cpus=1))
    bundles.assign(("generator", 0), place(cpus=0.7), 0)
    assert not bundles.room(place(cpus=0.7)) and bundles.room(place(cpus=0.3)) == [0]
    bundles.leave(("generator", 0))
    assert bundles.room(place(cpus=1)) == [0] and bundles.occupants(0) == []


@pytest.mark.parametrize("fields, message", [
    ({"cpus": 0}, "nothing to reserve"),
    ({"resources": {"GPU": 1}}, "use gpus"),
    ({"resources": {"fast_disk": 0}}, "reserves nothing"),
])
def test_pools_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        PoolConfig(**fields)
