"""The real coordinator over stand-ins inside one process, in a loop whose clock only waiting moves: the same each time.

Where such a run got stuck, nothing would be left to wait for but the deadline of a call, and the run would fail.
"""

import asyncio
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import coordinator_run
from benchmarks.coordinator_groups import LocalGroup
from benchmarks.coordinator_scale import by_thread, cut, efficiency, memory_growth, of_samples, windows
from benchmarks.coordinator_stubs import CHUNK
from benchmarks.virtual_time import run_in_virtual_time
from rlhf_ray.coordinator.weight_sync import WeightSync

BATCH, STEPS = 800, 5
CHUNKS = BATCH * STEPS // CHUNK


class Operations:
    """Counts what the coordinator does for its chunks: calls of functions, Python's and C's, and resumptions of
    coroutines and generators. Publishing is left out: it speaks to every generator."""

    def __init__(self) -> None:
        self.count, self.calls = 0, Counter[str]()

    def group(self) -> type[LocalGroup]:
        """A group of stand-ins that counts its calls by method."""

        class CountingGroup(LocalGroup):
            def call(group, rank: int, method: Any, *args: Any, **settings: Any) -> Any:
                self.calls[method.__name__] += 1
                return super().call(rank, method, *args, **settings)

        return CountingGroup

    def publish(self, publish: Any) -> Any:
        """The method of `WeightSync`, not counted."""

        async def uncounted(*args: Any) -> Any:
            sys.setprofile(None)
            try:
                return await publish(*args)
            finally:
                sys.setprofile(self.note)

        return uncounted

    def note(self, frame: Any, event: str, arg: Any) -> None:
        self.count += event in ("call", "c_call")


def run(directory: Path, generators: int) -> dict[str, Any]:
    """A whole run; also the calls that it made by method, and the operations that each chunk took."""
    config = coordinator_run.configuration(directory / str(generators), generators, STEPS * BATCH, BATCH, local=True)
    operations = Operations()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator_run, "LocalGroup", operations.group())
        patch.setattr(WeightSync, "publish", operations.publish(WeightSync.publish))
        sys.setprofile(operations.note)
        try:
            found = run_in_virtual_time(coordinator_run.over_local(config))
        finally:
            sys.setprofile(None)
    return {"generators": generators, "calls": operations.calls, "operations_a_chunk": operations.count / CHUNKS,
            **found}


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two runs with four generators. What is imported on the way is counted in the first."""
    directory = tmp_path_factory.mktemp("few")
    return run(directory / "first", 4), run(directory / "second", 4)


@pytest.fixture(scope="module")
def few(again: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    return again[1]


@pytest.fixture(scope="module")
def many(again: tuple[dict[str, Any], dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("many"), 256)


def test_every_sample_is_trained_once_and_none_is_left_over(few, many):
    for found in (few, many):
        assert found["ledger"]["committed"] == sum(found["ledger"].values()) == STEPS * BATCH
        assert [mark["samples"] for mark in found["marks"]] == [step * BATCH for step in range(STEPS + 1)]
        assert found["calls"]["generate"] == len(found["generated"]) == CHUNKS


def test_few_bytes_come_to_the_coordinator(few, many):
    for found in (few, many):
        assert 0 < of_samples(found["marks"], "received_bytes") < 1000


def test_a_chunk_costs_the_same_however_many_generators_there_are(few, many):
    assert many["operations_a_chunk"] < 1.05 * few["operations_a_chunk"]


def test_generators_are_at_work_all_the_time_while_there_is_work_for_them(few):
    assert efficiency(few) > 0.93


def test_a_run_in_a_loop_that_jumps_is_the_same_every_time(again):
    first, second = again
    assert first["generated"] == second["generated"]
    assert [mark["seconds"] for mark in first["marks"]] == [mark["seconds"] for mark in second["marks"]]


def test_waiting_takes_no_time_and_computing_does():
    async def wait_and_compute() -> tuple[float, float, float]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(*(asyncio.sleep(hours * 3600) for hours in (1, 2, 3)))
        waited = loop.time() - began
        cpu_began, began = time.thread_time(), loop.time()
        used = time.thread_time()
        while time.thread_time() < used + 0.05:
            pass
        computed = loop.time() - began
        return waited, computed, time.thread_time() - cpu_began

    waited, computed, cpu_seconds = run_in_virtual_time(wait_and_compute(), computing_counts=True)
    assert waited == pytest.approx(3 * 3600, abs=1)
    assert 0.05 <= computed <= cpu_seconds


def test_efficiency_is_the_share_of_time_at_work_while_there_is_work():
    found = {"generators": 2, "generated": [(0.0, 4.0), (1.0, 2.0), (5.0, 9.0)]}
    assert windows(found, 1) == [(0.0, 5.0)]
    assert efficiency(found) == pytest.approx((4 + 2) / 10)
    assert efficiency(found, windows(found, 5)[0]) == pytest.approx(1 / 2)


def test_the_threads_of_a_run_account_for_its_cpu_time(few):
    spent = by_thread(few["marks"])
    assert spent["event_loop_ms"] > spent["ledger_ms"] > 0
    assert sum(spent.values()) == pytest.approx(of_samples(few["marks"], "cpu_seconds", 1e3), rel=0.1)


def test_memory_that_grows_with_the_samples_is_told_from_memory_that_fills_once():
    marks = [{"samples": 100 * i, "rss_bytes": 1e8 + min(i, 2) * 1e7} for i in range(11)]
    assert memory_growth(marks)["bytes_per_sample"] == pytest.approx(0, abs=1e-6)
    grown = [{**mark, "rss_bytes": mark["rss_bytes"] + 50 * mark["samples"]} for mark in marks]
    assert memory_growth(grown)["bytes_per_sample"] == pytest.approx(50)


def test_parts_of_a_run_are_whole_steps():
    parts = cut([{"samples": i} for i in range(26)], 9)
    assert len(parts) == 9 and parts[0][0] == {"samples": 0} and parts[-1][-1] == {"samples": 25}
    assert all(a[-1] is b[0] for a, b in pairwise(parts))
    assert len(cut([{"samples": i} for i in range(4)], 9)) == 3
