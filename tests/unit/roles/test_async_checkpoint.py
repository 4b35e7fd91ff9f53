"""Files of a checkpoint that are written on a thread."""

import threading

import pytest

from rlhf_ray.roles import async_checkpoint
from rlhf_ray.roles.async_checkpoint import AsyncCheckpointWriter


def finish(writer):
    while not writer.progress().done:
        pass


def test_files_are_written_and_flushed_into_a_new_directory_or_an_old_one(tmp_path, monkeypatch):
    flushed, writer = [], AsyncCheckpointWriter()
    monkeypatch.setattr(async_checkpoint, "fsync_path", flushed.append)
    for text in ("first", "second"):
        writer.begin(tmp_path / "a" / "b", {"state.txt": lambda path, text=text: path.write_text(text)})
        finish(writer)
        assert (tmp_path / "a" / "b" / "state.txt").read_text() == text
    assert flushed == [tmp_path / "a" / "b" / "state.txt"] * 2


def test_progress_is_done_when_the_files_are_there_and_not_before(tmp_path):
    began, writer = threading.Event(), AsyncCheckpointWriter()
    writer.begin(tmp_path, {"state.txt": lambda path: (began.wait(30), path.write_text("x"))})
    assert not writer.progress().done
    began.set()
    finish(writer)
    assert (tmp_path / "state.txt").exists()


def test_an_error_of_a_write_is_raised_once_by_whoever_asks_for_progress(tmp_path):
    writer = AsyncCheckpointWriter()
    writer.begin(tmp_path, {"state.txt": lambda path: 1 / 0})
    with pytest.raises(ZeroDivisionError):
        finish(writer)
    assert writer.progress().done
