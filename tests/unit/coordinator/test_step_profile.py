"""When a step is profiled, by whom, and what whoever asked is told. Workers are stand-ins; files are real."""

import asyncio
import json

import pytest

from rlhf_ray.coordinator.step_profile import MOST_RANKS, StepProfiler
from rlhf_ray.errors import ConfigError, WorkerError
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.records import OperatorTime, WorkerProfile
from tests.unit.coordinator.stand_ins import StandInGroup, role_groups_of


async def profiled(rank, method, trace=""):
    if method == "end_profile":
        return WorkerProfile(trace.rsplit("/", 1)[1], 0.5, [OperatorTime("aten::mm", 3, 1.5)])
    return None


async def broken(rank, method, **named):
    if rank == 1:
        raise WorkerError(f"{method} failed")
    return await profiled(rank, method, **named)


def profiler_of(directory, at_step=None, generators=profiled, workers=1):
    silent = StandInGroup("reward", profiled)
    roles = role_groups_of(generators=StandInGroup("generator", generators, workers), reference=None, reward=silent,
                   policy=StandInGroup("policy_learner", profiled), critic=StandInGroup("critic_learner", profiled))
    return StepProfiler(RunDirectory(directory), roles, at_step), roles


async def make_step(profiler, roles, step):
    await profiler.begin(step)
    began = 10.0 * step
    roles.clock.add("policy_learner", began, began + 0.25)
    roles.clock.add("phase:policy_update", began, began + 0.25)
    await profiler.end(step, began, began + 1.0)


def steps_of(directory):
    return sorted(path.name for path in (directory / "profile").glob("*"))


def test_the_named_step_is_profiled_and_no_other(tmp_path):
    profiler, roles = profiler_of(tmp_path, at_step=2)

    async def work():
        for step in (1, 2, 3):
            await make_step(profiler, roles, step)

    asyncio.run(work())
    assert steps_of(tmp_path) == ["step_2"]
    assert roles.policy.log == [("begin_profile", 0), ("end_profile", 0)]
    assert roles.reward.log == [], "calls of its sources are not what is looked at"
    profile = json.loads((tmp_path / "profile/step_2/profile.json").read_text())
    assert set(profile["workers"]) == {"generator/0", "policy_learner/0", "critic_learner/0"}
    assert profile["workers"]["generator/0"] == {
        "trace": "generator_0.trace.json.gz", "seconds": 0.5,
        "operators": [{"name": "aten::mm", "calls": 3, "own_ms": 1.5}]}
    assert profile["spans"] == [["policy_learner/0", 0.0, 0.25]]


def test_whoever_asks_is_told_when_the_next_step_is_over(tmp_path):
    profiler, roles = profiler_of(tmp_path)

    async def work():
        await make_step(profiler, roles, 6)
        asked = [asyncio.create_task(profiler.requested({})) for _ in range(2)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in asked)
        await make_step(profiler, roles, 7)
        await make_step(profiler, roles, 8)
        return await asyncio.gather(*asked)

    said = {"step": 7, "directory": str(tmp_path / "profile/step_7")}
    assert asyncio.run(work()) == [said, said]
    assert steps_of(tmp_path) == ["step_7"]


def test_a_worker_that_cannot_be_profiled_is_left_out_and_the_run_goes_on(tmp_path):
    profiler, roles = profiler_of(tmp_path, at_step=1, generators=broken, workers=3)
    asyncio.run(make_step(profiler, roles, 1))
    profile = json.loads((tmp_path / "profile/step_1/profile.json").read_text())
    assert {"generator/0", "generator/2"} <= set(profile["workers"]) and "generator/1" not in profile["workers"]


def test_a_worker_has_a_minute_to_begin(tmp_path, monkeypatch):
    profiler, roles = profiler_of(tmp_path, at_step=1)
    given, call = [], roles.generators.call

    def noting(rank, method, deadline=None, **named):
        given.append((method.__name__, deadline and deadline.seconds))
        return call(rank, method, **named)

    monkeypatch.setattr(roles.generators, "call", noting)
    asyncio.run(make_step(profiler, roles, 1))
    assert given == [("begin_profile", 60.0), ("end_profile", None)], "the end waits for what the step's own calls left"


def test_the_clusters_own_record_of_calls_is_kept_where_there_is_one(tmp_path):
    _, roles = profiler_of(tmp_path)
    profiler = StepProfiler(RunDirectory(tmp_path), roles, 1, write_timeline=lambda path: path.write_text("[]"))
    asyncio.run(make_step(profiler, roles, 1))
    assert (tmp_path / "profile/step_1/ray.trace.json").read_text() == "[]"


def test_of_many_workers_of_a_role_the_first_ones_are_profiled(tmp_path):
    profiler, roles = profiler_of(tmp_path, at_step=1, workers=9)
    asyncio.run(make_step(profiler, roles, 1))
    assert len([each for each in roles.generators.log if each[0] == "end_profile"]) == MOST_RANKS


def test_a_run_that_ends_before_the_step_refuses(tmp_path):
    profiler, _ = profiler_of(tmp_path)

    async def work():
        asked = asyncio.create_task(profiler.requested({}))
        await asyncio.sleep(0)
        await profiler.begin(4)
        profiler.close()
        await asked

    with pytest.raises(ConfigError, match="no further step started"):
        asyncio.run(work())
    assert steps_of(tmp_path) == []


def test_a_step_that_is_given_up_leaves_nobody_recording_and_who_asks_then_is_not_kept_waiting(tmp_path):
    profiler, roles = profiler_of(tmp_path, at_step=4)

    async def work():
        await profiler.begin(4)
        profiler.close()
        await profiler.requested({})

    with pytest.raises(ConfigError, match="no further step started"):
        asyncio.run(work())
    assert roles.generators.log == [("begin_profile", 0), ("drop_profile", 0)]
    assert roles.policy.log == [("begin_profile", 0)], "learners are built again, or gone"


def test_a_profile_that_cannot_be_written_ends_no_run_and_is_told(tmp_path):
    _, roles = profiler_of(tmp_path)

    def full_disk(path):
        raise OSError(28, "No space left on device")

    said = []
    profiler = StepProfiler(RunDirectory(tmp_path), roles, say=said.append, write_timeline=full_disk)

    async def work():
        asked = asyncio.create_task(profiler.requested({}))
        await asyncio.sleep(0)
        await make_step(profiler, roles, 1)
        await asked

    with pytest.raises(ConfigError, match="step 1 could not be profiled: OSError: .*No space left"):
        asyncio.run(work())
    assert len(said) == 1 and "No space left" in said[0]
