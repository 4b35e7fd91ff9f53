"""Samples of batches are written beside the loop: which, in what order, and what becomes of failures."""

import asyncio
from pathlib import Path

import pytest

from rlhf_ray.config.training_loop import LoggingConfig
from rlhf_ray.coordinator.sample_saving import SampleSaving
from rlhf_ray.errors import CheckpointError, WorkerLost
from rlhf_ray.observability.metrics import MetricsWriter, read_metrics
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.chunk import Chunk, Lease, Place
from tests.unit.coordinator.harnesses import CoordinatorHarness
from tests.unit.coordinator.stand_ins import StandInPrompts, role_groups_of


def lease_of(*rows):
    """Chunks of two samples of each of the rows."""
    keys = [[SampleKey(0, row, n) for row in chunk for n in range(2)] for chunk in rows]
    chunks = [Chunk(Place(i), len(keys[i]), 0, keys[i], experience=f"chunk {i}", summary=f"about {i}")
              for i in range(len(rows))]
    return Lease(0, tuple(chunks), 0)


class Saving:
    """`SampleSaving` over an assembler that answers as told."""

    def __init__(self, saved="all", answer=None):
        self.asked, self.warnings, self._answer = [], [], answer
        roles = role_groups_of(assembler=self.assemble)
        self.saving = SampleSaving(saved, roles, StandInPrompts("prompts"), Path("/runs/a/samples"), None, True,
                                   self.warnings.append)

    async def assemble(self, rank, method, directory, term, step, limit, old_known, summaries, prompts, experiences):
        assert (method, directory, term, old_known) == ("save_samples", "/runs/a/samples", None, True)
        self.asked.append(f"begin {step}")
        if self._answer is not None:
            raise self._answer
        await asyncio.sleep(0.01)
        self.asked.append((step, limit, summaries, experiences))
        return 100 * step, 0.5


def test_samples_are_written_with_their_numbers_as_metrics_and_one_step_at_a_time():
    async def run():
        saving = Saving()
        first, second = (saving.saving.begin(step, lease_of([3], [5])) for step in (1, 2))
        assert await second == {"samples/bytes": 200.0, "samples/write_s": 0.5} and first.done()
        return saving.asked

    chunks = (["about 0", "about 1"], ["chunk 0", "chunk 1"])
    assert asyncio.run(run()) == ["begin 1", (1, None, *chunks), "begin 2", (2, None, *chunks)]


@pytest.mark.parametrize("saved, chunks", [(1, 1), (2, 1), (3, 2), (9, 3)])
def test_only_chunks_of_the_first_prompts_are_passed_on(saved, chunks):
    async def run():
        saving = Saving(saved)
        await saving.saving.begin(1, lease_of([3, 4], [5, 6], [7]))
        return saving.asked[-1]

    assert asyncio.run(run())[1:] == (saved, [f"about {i}" for i in range(chunks)],
                                      [f"chunk {i}" for i in range(chunks)])


def test_nothing_is_written_when_it_is_off():
    async def run():
        saving = Saving("off")
        return await saving.saving.begin(1, lease_of([3])), saving.asked

    assert asyncio.run(run()) == ({}, [])


def test_samples_that_were_lost_with_a_node_are_a_warning_and_no_end_of_the_run():
    async def run():
        lost = WorkerLost("an argument of save_samples was lost", "assembler", 0, 1, "save_samples", "result", 0.0)
        saving = Saving(answer=lost)
        return await saving.saving.begin(4, lease_of([3])), saving.warnings

    assert asyncio.run(run()) == (
        {}, ["the samples of step 4 are not in samples/: an argument of save_samples was lost"])


@pytest.fixture
def saved_run(ppo_config, summary, tmp_path):
    """saved_run(save) makes three steps, and writes metrics; `save(step)` is what the assembler does for samples."""

    def run(save):
        harness = CoordinatorHarness(ppo_config(prompts=4, steps=3), summary)
        coordinator, roles, assemble = harness.coordinator, harness.harness.roles, harness.harness.assemble

        async def answer(rank, method, *arguments, **named):
            return await (save(arguments[2]) if method == "save_samples" else assemble(
                rank, method, *arguments, **named))

        roles.assembler.answer, run.events = answer, harness.events
        coordinator.metrics = MetricsWriter(tmp_path, LoggingConfig(tensorboard=False, ray_metrics=False))
        coordinator.sample_saving = SampleSaving(
            "all", roles, harness.harness.prompts, tmp_path / "samples", None, True, print)
        try:
            return harness.go()
        finally:
            coordinator.metrics.close()

    return run


def test_the_row_of_a_step_has_the_size_and_seconds_of_its_own_samples(saved_run, tmp_path):
    async def save(step):
        return 100 * step, 0.25

    saved_run(save)
    assert [(row["step"], row["samples/bytes"], row["samples/write_s"]) for row in read_metrics(tmp_path)] == [
        (1, 100, 0.25), (2, 200, 0.25), (3, 300, 0.25)]


def test_a_full_disk_ends_the_run_after_the_row_of_its_step(saved_run, tmp_path):
    async def save(step):
        if step == 2:
            raise CheckpointError("the disk is full")
        return 1, 0.1

    with pytest.raises(CheckpointError, match="the disk is full"):
        saved_run(save)
    rows = read_metrics(tmp_path)
    assert [(row["step"], "samples/bytes" in row) for row in rows][:2] == [(1, True), (2, False)]


def test_a_step_does_not_wait_for_its_own_samples_but_for_those_before(saved_run):
    """The samples of step 1 are written until step 2 has been learned, and those of step 2 start after that."""
    order = []

    async def save(step):
        order.append(f"begin {step}")
        while step == 1 and "policy 1" not in saved_run.events:  # updates are counted from 0
            await asyncio.sleep(0.001)
        order.append(f"end {step}")
        return 1, 0.1

    saved_run(save)
    assert order == ["begin 1", "end 1", "begin 2", "end 2", "begin 3", "end 3"]
