"""The preloaded library shifts the clock of one process alone, and refuses or delays writes to chosen files alone."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chaos import preload
from chaos.preload import Preload

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="the library needs a C compiler")
CODE = """
import os, shutil, sqlite3, sys, time
for line in sys.stdin:
    try:
        print(eval(line), flush=True)
    except Exception as error:
        print(error, flush=True)
"""


@pytest.fixture(scope="module")
def library():
    return preload.environment()


@pytest.fixture
def process(library, tmp_path):
    """process(expression) -> what a process with the library prints for it."""
    child = subprocess.Popen([sys.executable, "-S", "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             text=True, cwd=tmp_path, env={**os.environ, **library})

    def ask(expression):
        child.stdin.write(expression + "\n")
        child.stdin.flush()
        return child.stdout.readline().strip()

    ask.pid, ask.library = child.pid, Preload(Path(library[preload.VARIABLE]))
    yield ask
    ask.library.stop()
    child.kill()
    child.communicate()


@pytest.mark.parametrize("hours", [1, -1])
def test_the_clock_of_one_process_is_shifted_until_it_is_stopped(process, hours):
    before = float(process("time.monotonic()"))
    process.library.shift_clock(process.pid, hours * 3600, 60)
    assert float(process("time.time()")) - time.time() == pytest.approx(hours * 3600, abs=30)
    assert float(process("time.monotonic()")) - before < 30
    process.library.stop()
    assert float(process("time.time()")) == pytest.approx(time.time(), abs=30)


def test_the_clock_of_another_process_is_not(process):
    process.library.shift_clock(os.getpid(), 3600, 60)
    assert float(process("time.time()")) == pytest.approx(time.time(), abs=30)


def test_it_stops_by_itself(process):
    process.library.shift_clock(process.pid, 3600, 0.01)
    time.sleep(0.02)
    assert float(process("time.time()")) == pytest.approx(time.time(), abs=30)


@pytest.mark.parametrize("write", [
    "os.write(os.open('full', os.O_CREAT | os.O_WRONLY), b'x')", "shutil.copyfile('other', 'full')",
    "sqlite3.connect('full').execute('create table t(x)')",
    "os.ftruncate(os.open('full', os.O_CREAT | os.O_WRONLY), 9)"])
def test_no_write_to_a_chosen_file_succeeds_as_on_a_full_disk(process, tmp_path, write):
    process("open('other', 'w').write('text')")
    process.library.fill_disk(f"{tmp_path}/full*", 60)
    assert "full" in process(write) or "No space left" in process(write)
    assert process.library.hits
    assert process("shutil.copyfile('other', 'third')") == "third"
    assert process("shutil.disk_usage('.').free") == "0", "it looks full to those who ask, too"
    process.library.stop()
    assert "No space" not in process(write) and process.library.hits


def test_writes_and_flushes_of_a_chosen_file_are_delayed(process, tmp_path):
    process.library.slow_disk(f"{tmp_path}/slow", 0.2, 60)
    for place, calls in (("slow", 2), ("fast", 0)):
        began = time.monotonic()
        process(f"[os.write(file := os.open({place!r}, os.O_CREAT | os.O_WRONLY), b'x'), os.fsync(file)]")
        assert time.monotonic() - began >= 0.2 * calls
    assert process.library.hits == 2
