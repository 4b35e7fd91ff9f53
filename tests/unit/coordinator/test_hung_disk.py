"""A disk that hangs under a run, at the flush of each file that the driver writes: the run ends, in bounded time, with
an error that names the file. Files and threads are real; workers are stand-ins, and time is virtual."""

import asyncio
import os
import time
from pathlib import Path

import pyarrow as pa
import pytest

from benchmarks.virtual_time import run_in_virtual_time
from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.config.training_loop import LoggingConfig
from rlhf_ray.coordinator import live_status
from rlhf_ray.coordinator.recovery import Recovery
from rlhf_ray.coordinator.sample_saving import SampleSaving
from rlhf_ray.errors import DiskStalled, RunInterrupted
from rlhf_ray.failpoints import VARIABLE, hanging
from rlhf_ray.files.writer_thread import HURRY_S, FileThread, RunFiles
from rlhf_ray.observability.metrics import MetricsWriter, read_metrics
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.observability.sample_files import SampleWriter
from rlhf_ray.roles.learner_state import SaveProgress
from tests.unit.coordinator.harnesses import CoordinatorHarness
from tests.unit.coordinator.stand_ins import ledger_of

TIMEOUT_S = 600.0


class DiskRun(CoordinatorHarness):
    """A run that writes all its files. Learners' parts are on disk when `parts` says so."""

    def __init__(self, config, summary, place, **arguments):
        super().__init__(config, summary, **arguments)
        harness, coordinator, self.files = self.harness, self.coordinator, RunFiles(TIMEOUT_S)
        self.parts, self.place, self.went = SaveProgress(True, (0, 0), ""), place, 0.0
        harness.ledger = ledger_of(config, harness.state.cursor, place, self.files.records)
        coordinator.pipeline = harness.pipeline_of(config, harness.roles)
        coordinator.files = self.files
        coordinator.metrics = MetricsWriter(place, LoggingConfig(tensorboard=False, ray_metrics=False))
        coordinator.sample_saving = SampleSaving(
            "all", harness.roles, harness.prompts, place / "samples", None, True, print)
        harness.roles.assembler.answer, self.thread = self.assemble, FileThread("samples", TIMEOUT_S)
        coordinator.recovery = Recovery(CheckpointStore(place / "checkpoints", 2), harness.roles, harness.state,
                                        harness.buffer, {}, harness.ledger,
                                        files=self.files)
        coordinator.__post_init__()

    def learner(self, role):
        trains = super().learner(role)

        async def behave(rank, method, *args):
            if method == "begin_save":
                Path(args[0]).mkdir(parents=True, exist_ok=True)
                (Path(args[0]) / f"rank_{rank}.safetensors").write_text(role)
            return await self.saved() if method == "save_progress" else await trains(rank, method, *args)

        return behave

    async def assemble(self, rank, method, *arguments, **named):
        if method != "save_samples":
            return await self.harness.assemble(rank, method, *arguments, **named)
        directory, _, step, *_ = arguments
        write = SampleWriter(Path(directory)).write
        return await self.thread.run(write, step, pa.table({"step": [step]})), 0.1

    async def saved(self):
        """How far the learners' parts are."""
        return self.parts

    def go(self):
        """Run to the end, whatever that is; `went` tells after how many virtual seconds it came."""
        async def timed():
            loop = asyncio.get_running_loop()
            try:
                await self.coordinator.run()
            finally:
                self.went = loop.time()

        run_in_virtual_time(timed())


@pytest.fixture
def run(ppo_config, summary, tmp_path):
    return DiskRun(ppo_config(prompts=4, steps=3, checkpoint={"every": 1}), summary, tmp_path)


@pytest.fixture
def hang(monkeypatch):
    """hang(file): the flushes of that file hang until the test is over."""
    yield lambda file: monkeypatch.setenv(VARIABLE, f"fsync@{file}:hang")
    monkeypatch.delenv(VARIABLE, raising=False)
    while hanging():
        time.sleep(0.01)


def test_with_a_disk_that_works_the_run_comes_to_its_end(run, tmp_path):
    run.go()
    assert CheckpointStore(tmp_path / "checkpoints", 2).latest().step == 3
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    assert run.coordinator.recovery.writing is None


@pytest.mark.parametrize("file", ["ledger.sqlite", "metrics.jsonl", "step_000001.parquet", "coordinator.json",
                                  "rank_1.safetensors", "manifest.json", "checkpoints"])
def test_each_file_whose_flush_hangs_ends_the_run_by_its_name(run, hang, file):
    hang(file)
    with pytest.raises(DiskStalled, match=rf"flush \S*{file} has made no progress for 60\d s") as caught:
        run.go()
    assert caught.value.exit_code == 69 and run.went < TIMEOUT_S + 10 * HURRY_S


def test_a_rank_whose_disk_hangs_ends_the_run_by_its_name(run):
    run.parts = SaveProgress(False, (1, 0), "flush /runs/a/rank_0.safetensors")
    with pytest.raises(DiskStalled, match=r"/0: flush /runs/a/rank_0.safetensors.* no progress for 60\d s"):
        run.go()
    assert run.went < 2 * TIMEOUT_S
    assert not list((run.place / "checkpoints").glob(".tmp*"))


def test_ranks_that_move_are_waited_for_however_long(ppo_config, summary, tmp_path):
    run = DiskRun(ppo_config(prompts=4, steps=1), summary, tmp_path)
    began = None

    async def saved():
        """Moves every five minutes, for half an hour."""
        nonlocal began
        now = asyncio.get_running_loop().time()
        began = now if began is None else began
        return SaveProgress(now - began > 3 * TIMEOUT_S, (int(now) // 300, 0), "write")

    run.saved = saved
    run.go()
    assert run.went > 3 * TIMEOUT_S


@pytest.mark.parametrize("file", ["metrics.jsonl", "manifest.json"])
def test_a_request_to_stop_while_the_disk_hangs_does_not_wait_for_ever(ppo_config, summary, tmp_path, hang, file):
    run = DiskRun(ppo_config(prompts=4, steps=3, checkpoint={"every": 1}), summary, tmp_path, stop_after=1)
    hang(file)
    with pytest.raises(DiskStalled, match=file):
        run.go()
    assert run.went < TIMEOUT_S + 10 * HURRY_S


def test_to_stop_at_once_takes_seconds(run, hang):
    """As the second signal does: the run's threads are told to hurry, and its task is cancelled."""
    hang("manifest.json")

    async def stopped():
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(run.coordinator.run())
        await asyncio.sleep(100)
        assert run.coordinator.recovery.writing.step == 1
        began = loop.time()
        run.files.hurry()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return loop.time() - began

    assert run_in_virtual_time(stopped()) <= 3 * HURRY_S


def test_a_stop_is_saved_when_the_disk_works_again_in_time(ppo_config, summary, tmp_path, hang):
    run = DiskRun(ppo_config(prompts=4, steps=3, checkpoint={"every": 1}), summary, tmp_path, stop_after=2)
    hang("manifest.json")

    async def back():
        asyncio.get_running_loop().call_later(TIMEOUT_S / 2, os.environ.pop, VARIABLE)
        await run.coordinator.run()

    with pytest.raises(RunInterrupted):
        run_in_virtual_time(back())
    assert CheckpointStore(tmp_path / "checkpoints", 2).latest().step in (1, 2)


def test_the_status_tells_of_a_checkpoint_that_is_under_way(run, hang, tmp_path):
    hang("manifest.json")

    async def looked():
        task = asyncio.ensure_future(run.coordinator.run())
        await asyncio.sleep(60)
        found = live_status.snapshot(run.coordinator)["checkpoint"]
        run.files.hurry()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return found

    found = run_in_virtual_time(looked())
    assert found["step"] == 1 and found["doing"].startswith("flush ") and found["seconds"] >= 0
    assert RunDirectory(tmp_path).status.name == "status.json"
