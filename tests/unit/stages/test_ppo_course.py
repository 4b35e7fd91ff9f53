"""What a stretch of a run leaves behind when a worker is lost in it."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from rlhf_ray.config.loop import LoggingConfig
from rlhf_ray.errors import WorkerError
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.stages.ppo_course import Course


def test_chunks_begun_again_are_dropped_before_their_ledger_is_closed(tmp_path):
    done = []

    async def close():
        done.append("pipeline closed")

    async def restore(_):
        return ["a place"]

    async def lost_learner(_):
        raise WorkerError("policy_learner/0 died in export")

    @asynccontextmanager
    async def changing():
        yield

    coordinator = SimpleNamespace(
        weights=SimpleNamespace(changing=changing), recovery=SimpleNamespace(restore=restore),
        state=SimpleNamespace(step=0), progress=SimpleNamespace(note=lambda _: None),
        pipeline=SimpleNamespace(start_again=lambda places: done.append(f"began {places}"), close=close,
                                 ledger=SimpleNamespace(close=lambda: done.append("ledger closed"))),
        best=SimpleNamespace(resume=lost_learner),
    )
    config = SimpleNamespace(logging=LoggingConfig())
    course = Course(config, RunDirectory(tmp_path), None, None, None, lambda *_: coordinator)
    with pytest.raises(WorkerError, match="died in export"):
        asyncio.run(course._stretch(SimpleNamespace(step=0, path=tmp_path), again=False, resume=False))
    assert done == ["began ['a place']", "pipeline closed", "ledger closed"]


def test_what_learners_were_doing_for_generators_is_over_before_they_are_replaced(tmp_path):
    done = []

    async def forget():
        await asyncio.sleep(0)
        done.append("no catch-up is under way")

    async def after(_):
        done.append("learners are replaced")

    course = Course(SimpleNamespace(), RunDirectory(tmp_path), SimpleNamespace(latest=lambda: None),
                    SimpleNamespace(requested=None), SimpleNamespace(after=after), None)
    course.coordinator = SimpleNamespace(
        weights=SimpleNamespace(forget=forget),
        team=SimpleNamespace(healing=SimpleNamespace(log=SimpleNamespace(rebuilt=lambda *_: None))))
    assert asyncio.run(course._after(WorkerError("policy_learner/0 died"))) is None
    assert done == ["no catch-up is under way", "learners are replaced"]
