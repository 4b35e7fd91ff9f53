"""Files of a checkpoint that are written on a thread."""

import threading
from types import SimpleNamespace

import pytest

from rlhf_ray.roles import learner_state
from rlhf_ray.roles.learner_state import LearnerState


def state_of(write):
    """The state of a rank whose engine writes its file by `write`."""
    return LearnerState(SimpleNamespace(snapshot=lambda: SimpleNamespace(write=write)), None, 0)


def finish(state):
    while not state.save_progress().done:
        pass


def test_files_are_written_and_flushed_into_a_new_directory_or_an_old_one(tmp_path, monkeypatch):
    flushed, texts, folder = [], iter(["first", "second"]), tmp_path / "a" / "b"
    monkeypatch.setattr(learner_state, "fsync_path", flushed.append)
    state = state_of(lambda path: path.write_text(next(texts)))
    for text in ("first", "second"):
        state.begin_save(folder, {"more.txt": lambda path, text=text: path.write_text(f"more of the {text}")})
        finish(state)
        assert (folder / "rank_0.safetensors").read_text() == text
        assert (folder / "more.txt").read_text() == f"more of the {text}"
    assert flushed == [folder / name for name in ("rank_0.safetensors", "rng_0.pt", "more.txt")] * 2


def test_progress_is_done_when_the_files_are_there_and_not_before(tmp_path):
    began = threading.Event()
    state = state_of(lambda path: (began.wait(30), path.write_text("x")))
    state.begin_save(tmp_path, {})
    assert not state.save_progress().done
    began.set()
    finish(state)
    assert (tmp_path / "rank_0.safetensors").exists()


def test_an_error_of_a_write_is_raised_once_by_whoever_asks_for_progress(tmp_path):
    state = state_of(lambda path: 1 / 0)
    state.begin_save(tmp_path, {})
    with pytest.raises(ZeroDivisionError):
        finish(state)
    assert state.save_progress().done
