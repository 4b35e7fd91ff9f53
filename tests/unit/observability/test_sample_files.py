"""Rollouts as text: rows as given, steps rolled into few files, and cut where a resumed run goes on."""

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_ray.errors import SupersededError
from rlhf_ray.observability import sample_files
from rlhf_ray.observability.metrics import NOTHING
from rlhf_ray.observability.sample_files import (
    SampleWriter,
    read_samples,
    sample_parts,
    some_samples,
    steps_with_samples,
)
from tests.unit.owners import take_over


def table(step, rows=1, **more):
    """Rows of a step with some of the columns of its samples."""
    return pa.Table.from_pylist([{"step": step, "sample": i, "prompt": f"p{step}", "response": "r", **more}
                                 for i in range(rows)])


def written(place, steps, resume_at=None, extra=lambda step: {}):
    writer = SampleWriter(place)
    if resume_at is not None:
        writer.cut(resume_at)
    for step in steps:
        writer.write(step, table(step, 2, **extra(step)))


def test_samples_come_back_as_they_were_written(tmp_path):
    rows = table(12, 2, score=0.5, advantages=[0.0, 0.25])
    size = SampleWriter(tmp_path / "samples").write(12, rows)
    assert os.listdir(tmp_path / "samples") == ["step_000012.parquet"]
    assert size == (tmp_path / "samples/step_000012.parquet").stat().st_size
    assert read_samples(tmp_path / "samples", 12) == rows.to_pylist()
    assert read_samples(tmp_path / "samples", 12, ["score", "gold"]) == [{"score": 0.5}] * 2
    assert read_samples(tmp_path / "samples", 13) == []


def test_files_are_compressed_with_zstd(tmp_path):
    SampleWriter(tmp_path).write(1, table(1, 4, advantages=[0.5] * 100))
    group = pq.ParquetFile(tmp_path / "step_000001.parquet").metadata.row_group(0)
    assert {group.column(i).compression for i in range(group.num_columns)} == {"ZSTD"}


def test_samples_of_steps_after_the_resumed_one_are_dropped(tmp_path):
    first = SampleWriter(tmp_path)
    for step in (1, 2, 10, 1_000_001):
        first.write(step, table(step))
    SampleWriter(tmp_path).cut(2)
    assert [part.path.name for part in sample_parts(tmp_path)] == ["step_000001.parquet", "step_000002.parquet"]
    SampleWriter(tmp_path).cut(NOTHING)
    assert os.listdir(tmp_path) == []


def steps_of(place):
    return [(part.first, [row["step"] for row in pq.read_table(part.path).to_pylist()]) for part in sample_parts(place)]


@pytest.fixture
def four(monkeypatch):
    monkeypatch.setattr(sample_files, "ROLLED", 4)


def test_steps_that_are_over_are_rolled_into_one_file(tmp_path, four):
    written(tmp_path, range(1, 11))
    assert sorted(os.listdir(tmp_path)) == ["step_000009.parquet", "step_000010.parquet",
                                            "steps_000001-000004.parquet", "steps_000005-000008.parquet"]
    assert steps_of(tmp_path) == [(1, [1, 1, 2, 2, 3, 3, 4, 4]), (5, [5, 5, 6, 6, 7, 7, 8, 8]), (9, [9, 9]),
                                  (10, [10, 10])]
    assert steps_with_samples(tmp_path) == list(range(1, 11))
    assert [row["step"] for row in read_samples(tmp_path, 6)] == [6, 6]
    assert [row["prompt"] for row in some_samples(tmp_path, 1)] == ["p1", "p6", "p10"]


def test_large_files_are_not_rolled(tmp_path, four, monkeypatch):
    monkeypatch.setattr(sample_files, "ROLLED_BYTES", 4 * SampleWriter(tmp_path).write(1, table(1)) - 1)
    for step in range(2, 10):
        SampleWriter(tmp_path).write(step, table(step))
    assert [part.first for part in sample_parts(tmp_path)] == list(range(1, 10))


def test_steps_with_other_columns_are_rolled_together(tmp_path, four):
    written(tmp_path, range(1, 6), extra=lambda step: {"reward/late": 0.5} if step > 2 else {})
    (first, _) = sample_parts(tmp_path)
    assert [row["reward/late"] for row in pq.read_table(first.path).to_pylist()] == [None] * 4 + [0.5] * 4


@pytest.mark.parametrize("saved", range(11))
def test_a_resumed_run_has_the_files_of_an_undisturbed_one(tmp_path, four, saved):
    written(tmp_path / "whole", range(1, 12))
    written(tmp_path / "again", range(1, 11))
    written(tmp_path / "again", range(saved + 1, 12), resume_at=saved)
    whole, again = ({p.name: p.read_bytes() for p in (tmp_path / d).iterdir()} for d in ("whole", "again"))
    assert whole == again and len(whole) == 5


@pytest.mark.parametrize("removed", range(5))
def test_a_process_that_ends_while_it_rolls_leaves_each_step_once(tmp_path, four, monkeypatch, removed):
    """The file of several steps is there, and some of the others are not removed yet."""
    writer, left = SampleWriter(tmp_path), [removed]

    def unlink(path, **_):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        os.unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(sample_files.Path, "unlink", unlink)
        for step in range(1, 6):
            try:
                writer.write(step, table(step))
            except KeyboardInterrupt:
                break
    assert steps_of(tmp_path)[0] == (1, [1, 2, 3, 4])
    written(tmp_path, (5,), resume_at=4)
    assert sorted(os.listdir(tmp_path)) == ["step_000005.parquet", "steps_000001-000004.parquet"]


def test_a_superseded_driver_removes_nothing(tmp_path, four):
    run = take_over(tmp_path)
    writer = SampleWriter(tmp_path / "samples", run)
    for step in range(1, 5):
        writer.write(step, table(step))
    take_over(tmp_path)
    with pytest.raises(SupersededError):
        writer.write(5, table(5))
    assert len(os.listdir(tmp_path / "samples")) == 4
