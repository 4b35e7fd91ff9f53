"""Rollouts as text: rows as given, steps rolled into few files, and cut where a resumed run goes on."""

import os

import pyarrow.parquet as pq
import pytest

from rlhf_ray.errors import SupersededError
from rlhf_ray.observability import sample_texts
from rlhf_ray.observability.sample_texts import SampleWriter, sample_parts, some_rollouts
from tests.unit.owners import take_over


def test_samples_come_back_with_missing_numbers_as_null(tmp_path):
    rows = [{"prompt": "p", "response": "r", "score": 0.5, "kl": 1.25}, {"prompt": "q", "response": "", "gold": -1.0}]
    part = SampleWriter(tmp_path / "samples").write(12, rows)
    assert part.name == "step_000012.parquet"
    assert pq.read_table(part).to_pylist() == [
        {"step": 12, "prompt": "p", "response": "r", "score": 0.5, "kl": 1.25, "gold": None},
        {"step": 12, "prompt": "q", "response": "", "score": None, "kl": None, "gold": -1.0},
    ]


def test_numbers_beside_the_usual_ones_get_columns_of_their_own(tmp_path):
    rows = [{"prompt": "p", "response": "r", "score": 0.5, "reward/a": 1.0, "reward/b": -0.5}]
    part = SampleWriter(tmp_path / "samples").write(3, rows * 2)
    row = {"step": 3, "prompt": "p", "response": "r", "score": 0.5, "kl": None, "gold": None,
           "reward/a": 1.0, "reward/b": -0.5}
    assert pq.read_table(part).to_pylist() == [row, row]


def test_samples_of_steps_after_the_resumed_one_are_dropped(tmp_path):
    first = SampleWriter(tmp_path)
    for step in (1, 2, 10, 1_000_001):
        first.write(step, [{"prompt": "p", "response": "r"}])
    SampleWriter(tmp_path, resume_at=2)
    assert [part.path.name for part in sample_parts(tmp_path)] == ["step_000001.parquet", "step_000002.parquet"]


def test_no_rows_make_no_part(tmp_path):
    assert SampleWriter(tmp_path).write(1, []) is None
    assert list(tmp_path.iterdir()) == []


def written(place, steps, resume_at=None, extra=lambda step: {}):
    writer = SampleWriter(place, resume_at)
    for step in steps:
        writer.write(step, [{"prompt": f"p{step}", "response": "r", **extra(step)}] * 2)


def steps_of(place):
    return [(part.first, [row["step"] for row in pq.read_table(part.path).to_pylist()]) for part in sample_parts(place)]


@pytest.fixture
def four(monkeypatch):
    monkeypatch.setattr(sample_texts, "ROLLED", 4)


def test_steps_that_are_over_are_rolled_into_one_file(tmp_path, four):
    written(tmp_path, range(1, 11))
    assert sorted(os.listdir(tmp_path)) == ["step_000009.parquet", "step_000010.parquet",
                                            "steps_000001-000004.parquet", "steps_000005-000008.parquet"]
    assert steps_of(tmp_path) == [(1, [1, 1, 2, 2, 3, 3, 4, 4]), (5, [5, 5, 6, 6, 7, 7, 8, 8]), (9, [9, 9]),
                                  (10, [10, 10])]
    assert [row["prompt"] for row in some_rollouts(tmp_path, 1)] == ["p1", "p9", "p10"]


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
        patch.setattr(sample_texts.Path, "unlink", unlink)
        for step in range(1, 6):
            try:
                writer.write(step, [{"prompt": "p", "response": "r"}])
            except KeyboardInterrupt:
                break
    assert steps_of(tmp_path)[0] == (1, [1, 2, 3, 4])
    written(tmp_path, (5,), resume_at=4)
    assert sorted(os.listdir(tmp_path)) == ["step_000005.parquet", "steps_000001-000004.parquet"]


def test_a_superseded_driver_removes_nothing(tmp_path, four):
    run = take_over(tmp_path)
    writer = SampleWriter(tmp_path / "samples", term=run)
    for step in range(1, 5):
        writer.write(step, [{"prompt": "p", "response": "r"}])
    take_over(tmp_path)
    with pytest.raises(SupersededError):
        writer.write(5, [{"prompt": "p", "response": "r"}])
    assert len(os.listdir(tmp_path / "samples")) == 4
