"""The run's directory: refusals that name the fix, writes that are whole or absent, samples dropped on resume."""

import json
import os
import socket

import numpy as np
import pyarrow as pa
import pytest

from rlhf_ray.errors import ConfigError, DataError
from rlhf_ray.files.writing import write_atomically
from rlhf_ray.observability.run_directory import RunDirectory, read_json
from rlhf_ray.observability.sample_files import SampleWriter


def test_naming_touches_nothing(tmp_path):
    run = RunDirectory(tmp_path / "run")
    assert run.report == tmp_path / "run" / "report.html"
    assert not run.path.exists()


def test_create_makes_missing_parents(tmp_path):
    assert RunDirectory.create(tmp_path / "a" / "b").path.is_dir()


@pytest.mark.parametrize("trace", ["metrics.jsonl", "checkpoints/step_3/x", "model/config.json", "summary.json"])
def test_refuses_a_directory_that_holds_a_run_and_names_the_fix(tmp_path, trace):
    (tmp_path / trace).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / trace).write_text("x")
    with pytest.raises(ConfigError, match=r"already holds a run \(.*" + trace.split("/")[0]) as refusal:
        RunDirectory.create(tmp_path)
    assert "--resume" in str(refusal.value) and "another run.dir" in str(refusal.value)
    assert RunDirectory.create(tmp_path, resume=True).path == tmp_path


def test_a_run_that_failed_before_its_first_step_may_be_started_again(tmp_path):
    RunDirectory.create(tmp_path).config.write_text("run: {}")
    (tmp_path / "checkpoints").mkdir()
    RunDirectory.create(tmp_path)


def test_two_runs_do_not_write_into_one_directory_and_the_second_is_told_who_does(tmp_path):
    first, second = RunDirectory.create(tmp_path), RunDirectory(tmp_path)
    said = f"being written by another run, process {os.getpid()} on {socket.gethostname()}, since "
    with first.owned(), pytest.raises(ConfigError, match=said), second.owned():
        pass
    with second.owned():
        pass


def test_says_how_much_is_free_when_the_disk_is_too_full(tmp_path):
    with pytest.raises(ConfigError, match=r"with \d+ MiB free, and the run needs at least 1000000000 MiB"):
        RunDirectory.create(tmp_path, need_mb=10**9)


def test_says_why_a_directory_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/run.*cannot be written: Not a directory"):
        RunDirectory.create(tmp_path / "file" / "run")
    for resume in (False, True):
        with pytest.raises(ConfigError, match="cannot be written: File name too long"):
            RunDirectory.create(tmp_path / ("d" * 300), resume)
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        RunDirectory.create("/proc/nope/run")


def test_json_holds_numbers_from_numpy_and_null_for_what_json_cannot_say(tmp_path):
    value = {"a": np.float32(0.5), "b": float("nan"), "c": [np.int64(3), float("inf")], 4: "ü"}
    target = RunDirectory(tmp_path).write_json("summary.json", value)
    assert json.loads(target.read_text()) == {"a": 0.5, "b": None, "c": [3, None], "4": "ü"}


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    target = tmp_path / "summary.json"
    target.write_text("old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(target, b"new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_what_a_killed_run_had_begun_to_write_is_removed(tmp_path, monkeypatch):
    run = RunDirectory.create(tmp_path / "run")
    SampleWriter(run.samples).write(1, pa.table({"step": [1]}))
    monkeypatch.setattr(os, "replace", lambda *_: None)  # killed before it is in its place
    SampleWriter(run.samples).write(2, pa.table({"step": [2]}))
    run.write_json("status.json", {})
    (run.path / ".gitignore").touch()
    (run.path / ".mine.json").touch()
    assert len(list(run.samples.iterdir())) == 2 and len(list(run.path.glob(".status*"))) == 1
    with run.owned():
        assert [part.name for part in run.samples.iterdir()] == ["step_000001.parquet"]
        assert {file.name for file in run.path.glob(".*")} == {".gitignore", ".mine.json"}


@pytest.mark.parametrize("text", ["{torn", "[1]", "3", '"text"'])
def test_a_damaged_file_is_named(tmp_path, text):
    run = RunDirectory(tmp_path)
    assert read_json(run.summary) == {} and not run.finished_well()
    run.summary.write_text(text)
    with pytest.raises(DataError, match=r"summary\.json (cannot be read: |holds ).*; fix or remove it"):
        run.finished_stage()
