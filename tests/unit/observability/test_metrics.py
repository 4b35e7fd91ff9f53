"""metrics.jsonl: every row readable, whatever the numbers and however the last process ended."""

import json
import math

import pytest

from rlhf_ray.config.training_loop import LoggingConfig
from rlhf_ray.errors import DataError
from rlhf_ray.observability import metrics
from rlhf_ray.observability.metrics import MetricsWriter, metric_rows_from_end, read_metrics

FILE_ONLY = LoggingConfig(tensorboard=False, ray_metrics=False)


def write_steps(run_dir, steps, resume_at=None):
    writer = MetricsWriter(run_dir, FILE_ONLY, resume_at)
    for step in steps:
        writer.write(step, {"reward/mean": step / 10})
    writer.close()
    return writer


def test_a_row_holds_step_time_and_the_flat_names(tmp_path):
    writer = MetricsWriter(tmp_path, FILE_ONLY)
    writer.write(3, {"reward/mean": 0.25, "weights/version": 7})
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    writer.close()
    assert row.pop("time") > 1_600_000_000
    assert row == {"step": 3, "reward/mean": 0.25, "weights/version": 7.0}


def test_an_evaluation_that_a_resumed_run_makes_again_is_one_row(tmp_path):
    for resume_at in (None, 4, 4):
        writer = MetricsWriter(tmp_path, FILE_ONLY, resume_at)
        writer.write(4, {"eval/reward": 0.1 + 0.2, "eval/kl": math.nan})
        writer.close()
    writer = MetricsWriter(tmp_path, FILE_ONLY, 4)
    writer.write(4, {"eval/reward": 0.3, "eval/kl": math.nan})  # of other held-out prompts
    writer.write(5, {"eval/reward": 0.3, "eval/kl": math.nan})
    writer.close()
    assert [(row["step"], row["eval/reward"]) for row in read_metrics(tmp_path)] == [(4, 0.1 + 0.2), (4, 0.3), (5, 0.3)]


def test_a_row_is_readable_before_the_writer_closes(tmp_path):
    writer = MetricsWriter(tmp_path, FILE_ONLY)
    writer.write(1, {"policy/loss": 1.0})
    assert [r["step"] for r in read_metrics(tmp_path)] == [1]
    writer.close()


def test_numbers_that_are_not_finite_are_null_and_strict_readers_can_read_them(tmp_path):
    writer = MetricsWriter(tmp_path, FILE_ONLY)
    writer.write(1, {"policy/loss": math.nan, "critic/loss": math.inf, "reward/mean": 1.0})
    writer.close()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (row["policy/loss"], row["critic/loss"], row["reward/mean"]) == (None, None, 1.0)


def test_a_torn_last_line_is_passed_over(tmp_path):
    write_steps(tmp_path, (1, 2))
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 3, "reward/me')
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]


def test_a_multibyte_character_torn_in_the_middle_is_passed_over(tmp_path):
    write_steps(tmp_path, (1,))
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write('{"step": 2, "ü'.encode()[:-1])
    assert [r["step"] for r in read_metrics(tmp_path)] == [1]


def test_damage_elsewhere_is_named_by_file_and_line(tmp_path):
    write_steps(tmp_path, (1, 2))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"garbage\n" + path.read_bytes())
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 1: .*garbage"):
        read_metrics(tmp_path)


def test_resuming_drops_later_rows_and_the_torn_line_then_goes_on(tmp_path):
    write_steps(tmp_path, (1, 2, 3, 4))
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 5')
    assert [row["step"] for row in write_steps(tmp_path, (3, 4), resume_at=2).dropped] == [3, 4]
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert len((tmp_path / "metrics.jsonl").read_bytes().splitlines()) == 4


def test_resuming_keeps_the_rows_before_as_they_were(tmp_path):
    write_steps(tmp_path, (1, 2, 3))
    before = read_metrics(tmp_path)
    write_steps(tmp_path, (), resume_at=2)
    assert read_metrics(tmp_path) == before[:2]


def test_opening_again_without_resuming_keeps_all_rows_and_none_sticks_to_a_torn_line(tmp_path):
    write_steps(tmp_path, (1, 2))
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 3')
    write_steps(tmp_path, (3,))
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3]


def test_without_a_file_there_are_no_rows(tmp_path):
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize("values", [{"step": 1.0}, {"time": 1.0}, {"reward/mean": "high"}])
def test_refuses_what_would_damage_a_row_and_writes_nothing(tmp_path, values):
    writer = MetricsWriter(tmp_path, FILE_ONLY)
    with pytest.raises(ValueError, match=next(iter(values))):
        writer.write(1, values)
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_closing_twice_is_no_error(tmp_path):
    writer = MetricsWriter(tmp_path, LoggingConfig(tensorboard=True, ray_metrics=True))
    writer.close()
    writer.close()


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(metrics, "PART_BYTES", 150)  # three rows


def test_a_long_file_goes_on_in_others_which_are_read_as_one(tmp_path, small_parts):
    write_steps(tmp_path, range(1, 9))
    assert [len(path.read_bytes().splitlines()) for path in sorted(tmp_path.iterdir())] == [3, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics-00002.jsonl", "metrics-00003.jsonl",
                                                                "metrics.jsonl"]
    assert [r["step"] for r in read_metrics(tmp_path)] == [*range(1, 9)]
    assert [r["step"] for r in metric_rows_from_end(tmp_path)] == [*range(8, 0, -1)]


@pytest.mark.parametrize("saved", range(-1, 10))
def test_a_run_of_several_files_resumes_after_any_of_its_rows(tmp_path, small_parts, saved):
    write_steps(tmp_path, range(1, 10))
    dropped = write_steps(tmp_path, range(max(saved, 0) + 1, 12), resume_at=saved).dropped
    assert [r["step"] for r in dropped] == [*range(max(saved, 0) + 1, 10)]
    assert [r["step"] for r in read_metrics(tmp_path)] == [*range(1, 12)]


def test_a_resume_replaces_the_newest_file_alone_and_reads_no_row_before_its_own(tmp_path, small_parts):
    write_steps(tmp_path, range(1, 9))
    first = tmp_path / "metrics.jsonl"
    first.write_bytes(b"garbage" + first.read_bytes())
    old = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    write_steps(tmp_path, (8,), resume_at=7)
    new = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    assert {name for name in new if new[name] != old[name]} == {"metrics-00003.jsonl"}
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 1: .*garbage"):
        read_metrics(tmp_path)


def test_damage_found_from_the_end_is_named_by_its_line(tmp_path):
    write_steps(tmp_path, (1, 2, 3))
    path = tmp_path / "metrics.jsonl"
    first, _, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"garbage\n" + third)
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2: .*garbage"):
        write_steps(tmp_path, (), resume_at=1)
    assert path.read_bytes() == first + b"garbage\n" + third
