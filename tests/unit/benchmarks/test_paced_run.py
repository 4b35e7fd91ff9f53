"""Training runs that take turns: what a turn reports, that an idle side makes nothing, how failures are told."""

import sys
import time
from pathlib import Path

import pytest

import benchmarks.trl
from benchmarks.side_process import SideFailed
from benchmarks.trl.paced_run import PacedRun

SCRIPT = """
import sys, time
sys.path.insert(0, {pacing!r})
from pacing import Pacing
pacing = Pacing(int(sys.argv[1]))
for update in range({updates}):
    time.sleep(0.02)
    open({made!r}, "a").write("x")
    if update == {fails_at}:
        sys.exit("out of luck")
    pacing.updated()
"""


def paced(directory: Path, updates: int = 6, fails_at: int = -1, freeze: bool = False) -> PacedRun:
    script = directory / "run.py"
    script.write_text(SCRIPT.format(pacing=str(Path(benchmarks.trl.__file__).parent), updates=updates,
                                    made=str(directory / "made"), fails_at=fails_at))
    return PacedRun("toy", [sys.executable, script], {}, directory / "home", freeze)


@pytest.mark.parametrize("freeze", [False, True])
def test_a_turn_is_as_many_updates_as_asked_for_and_none_follow_unasked(tmp_path, freeze):
    with paced(tmp_path, freeze=freeze) as run:
        assert (tmp_path / "made").read_text() == "x"  # the one that warms up
        began = time.perf_counter()
        seconds = run.turn(3)
        whole = time.perf_counter() - began
        time.sleep(0.1)
        assert (tmp_path / "made").read_text() == "xxxx"
        assert len(seconds) == 3 and min(seconds) >= 0.02 and sum(seconds) <= whole
        run.turn(2)
        run.finish()
    assert (tmp_path / "made").read_text() == "x" * 6


def test_time_at_rest_belongs_to_no_update(tmp_path):
    with paced(tmp_path) as run:
        time.sleep(1.0)
        began = time.perf_counter()
        (seconds,) = run.turn(1)
        assert seconds <= time.perf_counter() - began


def test_a_run_that_fails_in_a_turn_is_quoted(tmp_path):
    with paced(tmp_path, fails_at=2) as run, pytest.raises(SideFailed, match="out of luck"):
        run.turn(4)


def test_a_run_that_fails_before_its_first_update_is_quoted(tmp_path):
    with pytest.raises(SideFailed, match="out of luck"), paced(tmp_path, fails_at=0):
        pass
