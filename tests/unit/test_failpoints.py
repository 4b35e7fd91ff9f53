"""Failpoints: nothing without the variable, an end at the named visit, and names that are spelled wrong."""

import os
import subprocess
import sys
import threading
import time

import pytest

from rlhf_ray import failpoints
from rlhf_ray.errors import ConfigError
from rlhf_ray.failpoints import EXIT_CODE, POINTS, VARIABLE, Failpoint, armed, hanging, reached

PROGRAM = """
from rlhf_ray.failpoints import reached
try:
    for visit in (1, 2, 3):
        reached("checkpoint_unnamed")
        reached("update_consumed")
        print(visit, flush=True)
finally:
    print("tidied up", flush=True)
"""


def program(value):
    """The program with the variable set so."""
    environment = {**os.environ, **({VARIABLE: value} if value else {})}
    return subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60)


def test_without_the_variable_nothing_happens(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert armed() is None
    for name in POINTS:
        reached(name)


@pytest.mark.parametrize("value, printed", [("checkpoint_unnamed:exit", ""), ("update_consumed:exit:3", "1\n2\n")])
def test_the_process_ends_at_the_visit_that_was_named_and_tidies_nothing_up(value, printed):
    ended = program(value)
    assert (ended.returncode, ended.stdout) == (EXIT_CODE, printed)


def test_a_visit_that_never_comes_ends_nothing():
    ended = program("update_consumed:exit:4")
    assert (ended.returncode, ended.stdout) == (0, "1\n2\n3\ntidied up\n")


def test_what_is_armed(monkeypatch):
    monkeypatch.setenv(VARIABLE, "publication_begun:exit:2")
    assert armed() == Failpoint("publication_begun", 2)


@pytest.mark.parametrize("value, reaching", [("fsync:hang", [1]), ("fsync@b*:hang", [2]), ("fsync@a:hang:2", [3])])
def test_a_flush_hangs_until_the_variable_is_gone_and_may_be_that_of_one_file(monkeypatch, value, reaching):
    failpoints._reached.clear()
    monkeypatch.setenv(VARIABLE, value)
    began, done = [], []

    def flush():
        for number, name in enumerate(("a", "b.json", "a"), start=1):
            began.append(number)
            reached("fsync", name)
            done.append(number)

    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    while not hanging():
        time.sleep(0.01)
    assert began[-1:] == reaching and thread.is_alive()
    monkeypatch.delenv(VARIABLE)
    thread.join(10)
    assert done == [1, 2, 3] and not hanging()


@pytest.mark.parametrize("value", ["checkpoint:exit", "checkpoint_unnamed", "checkpoint_unnamed:raise",
                                   "checkpoint_unnamed:hang", "update_consumed@ledger.sqlite:exit", "fsync:stop",
                                   "checkpoint_unnamed:exit:0", "checkpoint_unnamed:exit:two", ":exit"])
def test_what_is_spelled_wrong_is_refused_with_the_names_there_are(monkeypatch, value):
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ConfigError, match="checkpoint_uncommitted") as caught:
        armed()
    assert repr(value) in str(caught.value)
