"""status.json while a run goes on, and after it."""

import asyncio
import errno
import json
import threading
import time

import pytest

from rlhf_ray.config.training_loop import EarlyStopConfig
from rlhf_ray.coordinator import live_status
from rlhf_ray.coordinator.early_stop import EarlyStop
from rlhf_ray.errors import RunInterrupted, TrainingError
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.observability.spans import Task
from tests.unit.coordinator.harnesses import CoordinatorHarness


@pytest.fixture
def run(ppo_config, summary, monkeypatch):
    monkeypatch.setattr(live_status, "EVERY_S", 0.02)
    return CoordinatorHarness(ppo_config(prompts=4, steps=3), summary)


def status(directory):
    return json.loads((directory / "status.json").read_text())


def test_it_says_who_works_on_what_and_how_the_run_ended(run, tmp_path):
    clock = run.coordinator.roles.clock
    clock.now = lambda: 1000.0

    async def work():
        async with live_status.live_status(lambda: run.coordinator, RunDirectory(tmp_path)):
            for since in (1.0, 3.0):
                clock.under_way.add(Task("generator", 1, "generate", clock.now() - since))
            await asyncio.sleep(0.3)
            return status(tmp_path)

    live = asyncio.run(work())
    assert (live["step"], live["steps"], live["max_staleness"]) == (0, 3, 0) and "ended" not in live
    assert live["reference"] == run.coordinator.config.model.path
    ((line),) = live["under_way"]
    assert (line["worker"], line["phase"], line["calls"]) == ("generator/1", "generate", 2)
    assert line["seconds"] == 3.0
    assert status(tmp_path)["ended"] == "finished"


def test_it_says_what_happens_to_chunks_and_who_holds_a_lease(ppo_config, summary):
    """The status of each moment of a run, told when the policy begins its update."""
    run, seen = CoordinatorHarness(ppo_config(prompts=4, chunk=2, staleness=1, steps=3), summary), []
    learn = run.coordinator.roles.policy.answer

    async def look(rank, method, *args):
        if method == "update" and rank == 0:
            seen.append(live_status.snapshot(run.coordinator))
        return await learn(rank, method, *args)

    run.coordinator.roles.policy.answer = look
    run.go()
    for step, now in enumerate(seen):
        ((lease),) = now["leases"]
        assert (lease["samples"], lease["version"], lease["held_by"]) == (4, step, ["policy", "critic"])
        assert sum(line["samples"] for line in now["chunks"]) == now["buffer"]["under_way"]
        assert all(0 <= line["version"] <= step and line["seconds"] >= 0 for line in now["chunks"])
    assert {line["doing"] for now in seen for line in now["chunks"]} <= {"generated", "scored", "read by the learners"}
    assert live_status.snapshot(run.coordinator)["leases"] == []


def test_a_run_that_failed_does_not_look_like_one_that_ended_well(run, tmp_path):
    async def work():
        async with live_status.live_status(lambda: run.coordinator, RunDirectory(tmp_path)):
            raise TrainingError("not finite")

    with pytest.raises(TrainingError):
        asyncio.run(work())
    assert status(tmp_path)["ended"] == "failed: not finite"


@pytest.mark.parametrize(("error", "said"), [
    (RunInterrupted("stopped by SIGTERM after step 2"), "stopped by SIGTERM after step 2"),
    (KeyError("x"), "failed: KeyError: 'x'"), (asyncio.CancelledError(), "failed: CancelledError"),
])
def test_what_ended_a_run_is_said_in_words(error, said):
    assert live_status.how_it_ended(error) == said


def test_a_run_that_gave_up_early_says_so(run, tmp_path):
    early = run.coordinator.state.early_stop = EarlyStop(EarlyStopConfig(kl_above=1.0, patience=1))
    run.coordinator.state.step = 1
    early.observe(1, 5.0, 0.0)

    async def work():
        async with live_status.live_status(lambda: run.coordinator, RunDirectory(tmp_path)):
            pass

    asyncio.run(work())
    assert status(tmp_path)["ended"].startswith("stopped early: ") and "5" in status(tmp_path)["ended"]


def test_a_slow_write_does_not_have_the_last_word(run, tmp_path, monkeypatch):
    """A write that is under way when the run ends must not put its old state over the end."""
    begun, write = threading.Event(), RunDirectory.write_json

    def slowly(directory, name, value):
        if "ended" not in value:
            begun.set()
            time.sleep(0.3)
        return write(directory, name, value)

    monkeypatch.setattr(RunDirectory, "write_json", slowly)

    async def work():
        async with live_status.live_status(lambda: run.coordinator, RunDirectory(tmp_path)):
            await asyncio.to_thread(begun.wait)

    asyncio.run(work())
    assert status(tmp_path)["ended"] == "finished"


def test_a_disk_that_is_full_does_not_bury_what_the_run_says_of_it(run, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    async def work():
        async with live_status.live_status(lambda: run.coordinator, RunDirectory(tmp_path)):
            monkeypatch.setattr(RunDirectory, "write_json", full)
            raise TrainingError("the disk is full")

    with pytest.raises(TrainingError, match="the disk is full"):
        asyncio.run(work())


def test_a_disk_that_is_full_for_a_while_ends_no_status(run, tmp_path, monkeypatch):
    write, refused = RunDirectory.write_json, []

    def full_at_first(directory, name, value):
        if len(refused) < 2:
            refused.append(name)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(directory, name, value)

    async def work():
        async with live_status.live_status(lambda: run.coordinator, RunDirectory(tmp_path)):
            while not (tmp_path / "status.json").exists():
                await asyncio.sleep(0.01)
            return status(tmp_path)

    monkeypatch.setattr(RunDirectory, "write_json", full_at_first)
    assert "ended" not in asyncio.run(asyncio.wait_for(work(), 10)) and len(refused) == 2
