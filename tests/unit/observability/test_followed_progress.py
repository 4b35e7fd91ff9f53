"""Progress of a run somewhere else: plain lines as they come, a bar on a terminal."""

import io

import pytest

from rlhf_ray.config.estimators import METHODS
from rlhf_ray.observability.progress import STEP, FollowedProgress, StageProgress, newest_step


class Terminal(io.StringIO):
    def isatty(self):
        return True


def printed(**numbers):
    """What a stage prints where its output is no terminal."""
    out = io.StringIO()
    with StageProgress("reward model", 20, stream=out, every_s=0) as progress:
        progress.update(1, **numbers)
        progress.note("a note: step 3 of nothing")
        progress.update(2, **numbers)
    return out.getvalue()


def test_the_lines_of_a_stage_are_understood():
    lines = printed(loss=0.5, KL=3.0).splitlines()
    (first, second) = [found for line in lines if (found := STEP.fullmatch(line))]
    assert (first["name"], first["step"], first["total"]) == ("reward model", "1", "20")
    assert second["numbers"].strip() == "loss 0.5  KL 3" and second["left"].strip().endswith("left")


@pytest.mark.parametrize("name", METHODS.values())
def test_the_lines_of_every_method_are_understood(name):
    out = io.StringIO()
    with StageProgress(name, 20, stream=out, every_s=0) as progress:
        progress.update(1, loss=0.5)
    assert STEP.fullmatch(out.getvalue().splitlines()[1])["name"] == name


def test_in_a_pipe_everything_passes_as_it_is_however_it_is_cut():
    text, out = printed(loss=0.5), io.StringIO()
    with FollowedProgress(out) as followed:
        for begin in range(0, len(text), 7):
            followed.feed(text[begin : begin + 7])
        followed.feed("half a line")
    assert out.getvalue() == text + "half a line\n"


def test_on_a_terminal_steps_become_one_bar_and_other_lines_stay(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with FollowedProgress(out) as followed:
        followed.feed(printed(loss=0.5))
    text = out.getvalue()
    assert "2/20" in text and "a note: step 3 of nothing" in text and "reward model: step 2/20" not in text


@pytest.mark.parametrize(("text", "line"), [
    ("PPO: step 1/9\nPPO: step 2/9  reward 3\nends\n", "PPO: step 2/9  reward 3"), ("nothing\n", None)])
def test_the_newest_step_is_found(text, line):
    assert newest_step(text) == line
