"""Progress and tables: plain lines where there is no terminal, a live bar where there is one."""

import io
import os
import pty
import re
import subprocess
import sys
import textwrap

import pytest

from rlhf_ray.observability.progress import StageProgress, duration
from rlhf_ray.observability.tables import Change, changes, print_before_after, print_texts

ESCAPE = "\x1b"


def lines_of(stream):
    return stream.getvalue().splitlines()


def test_plain_output_has_no_escape_codes_even_when_colour_is_forced(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    with StageProgress("ppo", total=2, stream=stream) as progress:
        progress.update(1, reward=0.5)
        progress.warn("generator 1 was lost")
        progress.update(2, reward=0.75)
    print_before_after([Change("reward", 0.0, 1.0)], stream)
    print_texts([{"prompt": "a", "messages": [{"role": "user", "content": "hello"}], "before": f"{ESCAPE}[31mred",
                  "after": "[bold]x[/bold]"}], stream)
    text = stream.getvalue()
    assert ESCAPE not in text
    assert "ppo: warning: generator 1 was lost\n" in text
    assert "[bold]x[/bold]" in text and "\\x1b[31mred" in text and "user: hello" in text


def test_plain_lines_show_the_numbers_and_the_first_and_last_steps(monkeypatch):
    stream = io.StringIO()
    with StageProgress("ppo", total=100, stream=stream, every_s=3600) as progress:
        for step in range(1, 101):
            progress.update(step, reward=step / 8, kl=2.0, samples_per_second=41.25)
        assert "step 100/100" in lines_of(stream)[-1], "the last step shows at once, not when the stage ends"
    steps = [line for line in lines_of(stream) if "step" in line and "/100" in line]
    assert len(steps) == 2
    assert steps[0] == "ppo: step 1/100  reward 0.125  KL 2  samples/s 41.25", "one step is no pace yet"
    assert steps[1] == "ppo: step 100/100  reward 12.5  KL 2  samples/s 41.25"
    assert lines_of(stream)[-1] == "ppo: done in 0 s"


def test_plain_lines_come_at_the_interval(monkeypatch):
    now = iter(range(1000))
    monkeypatch.setattr("rlhf_ray.observability.progress.time.monotonic", lambda: float(next(now)))
    stream = io.StringIO()
    with StageProgress("sft", total=20, stream=stream, every_s=5) as progress:
        for step in range(1, 20):
            progress.update(step, loss=1.0)
    shown = [int(line.split("step ")[1].split("/")[0]) for line in lines_of(stream) if "/20  loss" in line]
    assert shown == [1, 6, 11, 16, 19]


def test_a_stage_that_fails_says_where_it_stopped():
    stream = io.StringIO()
    with pytest.raises(RuntimeError), StageProgress("ppo", total=9, stream=stream) as progress:
        progress.update(4, reward=1.0)
        raise RuntimeError
    assert lines_of(stream)[-1].startswith("ppo: stopped at step 4/9 after")


def test_time_left_follows_the_pace_since_the_resumed_step(monkeypatch):
    now = iter((100.0, 110.0, 120.0))
    monkeypatch.setattr("rlhf_ray.observability.progress.time.monotonic", lambda: next(now))
    progress = StageProgress("ppo", total=50, start=40, stream=io.StringIO())
    assert progress.seconds_left() is None
    progress.update(41)
    progress.update(42)
    assert progress.seconds_left() == pytest.approx(80.0)


def test_stages_open_one_after_another():
    stream = io.StringIO()
    for name in ("sft", "ppo"):
        with StageProgress(name, total=1, stream=stream) as progress:
            progress.update(1, loss=1.0)
            progress.note("saved")
    text = stream.getvalue()
    assert text.index("sft: done") < text.index("ppo: 1 of 1") < text.index("ppo: saved") < text.index("ppo: done")


def in_a_terminal(code):
    """What the code writes to a pseudo-terminal 100 columns wide."""
    outside, inside = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=inside, env=environment)
    os.close(inside)
    shown = b""
    try:
        while chunk := os.read(outside, 65536):
            shown += chunk
    except OSError:  # the other side closed: Linux's way of saying end of file
        pass
    os.close(outside)
    assert process.wait(timeout=60) == 0
    return shown.decode()


def test_a_terminal_shows_a_live_bar_with_numbers_notes_and_warnings():
    shown = in_a_terminal("""
        from rlhf_ray.observability.progress import StageProgress
        with StageProgress("ppo [seed 1]", total=4) as progress:
            progress.update(1, reward=0.25, kl=1.5)
            progress.warn("generator [1] was lost")
            progress.note("step [2] saved")
            progress.update(4, reward=0.5, kl=2.5)
    """)
    assert f"{ESCAPE}[?25l" in shown and f"{ESCAPE}[?25h" in shown, "cursor hidden while live, shown again after"
    assert "━" in shown and "4/4" in shown and "reward 0.5  KL 2.5" in shown
    assert "warning: generator [1] was lost" in shown and "step [2] saved" in shown
    assert "ppo [seed 1]" in shown.split("━")[0]
    assert shown.rstrip().endswith("ppo [seed 1]: done in 0 s")


def test_a_terminal_gets_a_coloured_table():
    shown = in_a_terminal("""
        from rlhf_ray.observability.tables import Change, print_before_after
        print_before_after([Change("reward", 0.0, 0.5), Change("eval/loss", 1.0, 2.0)])
    """)
    assert re.search(rf"{ESCAPE}\[1;32m *\+0\.5 better", shown), "green"
    assert re.search(rf"{ESCAPE}\[1;31m *\+1 worse", shown), "red"


def test_plain_tables_are_aligned():
    stream = io.StringIO()
    print_before_after([Change("reward/mean", 0.125, 0.5), Change("kl", 0.0, None)], stream)
    assert lines_of(stream) == [
        "metric       before  after         change",
        "reward/mean   0.125    0.5  +0.375 better",
        "kl                0      –",
    ]


@pytest.mark.parametrize(
    "metric, before, after, verdict",
    [("reward/gold", 0.0, 1.0, "better"), ("eval/loss", 0.0, 1.0, "worse"), ("eval/accuracy", 1.0, 0.5, "worse"),
     ("kl", 0.0, 5.0, ""), ("reward", 1.0, 1.0, ""), ("reward", None, 1.0, "")],
)
def test_verdicts_know_which_way_is_better(metric, before, after, verdict):
    assert Change(metric, before, after).verdict == verdict


def test_changes_keep_metrics_of_one_side_only():
    assert changes({"reward": 0.0}, {"reward": 1.0, "kl": 2.0}) == [("reward", 0.0, 1.0), ("kl", None, 2.0)]


@pytest.mark.parametrize(
    "seconds, words", [(42.4, "42 s"), (59.7, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")]
)
def test_durations_read_as_a_person_says_them(seconds, words):
    assert duration(seconds) == words


def test_a_warning_that_was_given_once_is_not_repeated():
    stream = io.StringIO()
    progress = StageProgress("PPO", 3, stream=stream)
    for text in ("row 3 leaves", "row 4 leaves", "row 3 leaves"):
        progress.warn_once(text)
    assert stream.getvalue().splitlines() == ["PPO: warning: row 3 leaves", "PPO: warning: row 4 leaves"]
