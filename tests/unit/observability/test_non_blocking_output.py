"""Output that fails: nothing raises, nothing waits, and what was dropped is told when somebody takes output again."""

import io
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from rlhf_ray.observability.non_blocking_output import DRAIN_S, MAX_PENDING_BYTES, NonBlockingStream, non_blocking
from rlhf_ray.observability.progress import StageProgress


def piped():
    """A reader's descriptor, and a text stream that writes to it."""
    reader, writer = os.pipe()
    return reader, os.fdopen(writer, "w")


def fill(stream):
    """Leave no room in the pipe, so that nothing is taken until somebody reads."""
    os.set_blocking(stream.fileno(), False)
    with suppress(BlockingIOError):
        while True:
            os.write(stream.fileno(), b"." * 4096)
    os.set_blocking(stream.fileno(), True)


def taken(reader, until, seconds=10):
    """What the reader gets until it has seen `until`."""
    found, end = b"", time.monotonic() + seconds
    while until not in found and time.monotonic() < end:
        found += os.read(reader, 2**16)
    return found.decode()


def test_lines_arrive_in_order():
    reader, stream = piped()
    with StageProgress("ppo", total=2, stream=stream) as progress:
        progress.note("one")
        progress.warn("two")
    assert taken(reader, b"stopped").splitlines()[1:3] == ["ppo: one", "ppo: warning: two"]


def test_a_stage_that_is_over_leaves_neither_thread_nor_descriptor():
    reader, stream = piped()
    for _ in range(3):
        with StageProgress("ppo", total=1, stream=stream) as progress:
            progress.note("one")
    stream.close()
    found = b""
    while part := os.read(reader, 4096):  # until nobody holds the other end
        found += part
    assert found.count(b"one") == 3


def test_a_reader_that_is_gone_ends_nothing():
    reader, stream = piped()
    os.close(reader)
    with StageProgress("ppo", total=1, stream=stream) as progress:
        for number in range(5):
            progress.note(str(number))
        progress.update(1, loss=1.0)


def test_a_reader_that_reads_nothing_holds_up_nothing_and_is_told_what_it_missed():
    reader, stream = piped()
    fill(stream)
    output, line = non_blocking(stream), "x" * 1023 + "\n"
    for _ in range(3 * MAX_PENDING_BYTES // 1024):
        output.write(line)
    assert output.dropped == 2048
    missed = output.dropped
    assert f"[{missed} lines of output were dropped: nothing read them]" in taken(reader, b"nothing read them")
    output.write("again\n")
    assert "again" in taken(reader, b"again") and output.dropped == 0


def test_the_end_of_a_stage_does_not_wait_for_a_reader_that_reads_nothing():
    _, stream = piped()
    began = time.monotonic()
    with StageProgress("ppo", total=1, stream=stream) as progress:
        for _ in range(100):
            progress.note("x" * 1000)
    assert time.monotonic() - began > 1, "it gives the reader its time"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_ends_nothing():
    with open("/dev/full", "w") as stream, StageProgress("ppo", total=1, stream=stream) as progress:
        progress.note("one")
        progress.update(1, loss=1.0)
        assert progress._stream.dropped <= 4


class Raising(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("stream", [None, Raising()])
def test_a_stream_that_is_closed_or_raises_ends_nothing(stream):
    output = NonBlockingStream(stream)
    assert output.write("one\n") == 4 and not output.isatty()
    output.flush()
    output.drain()


PROGRAM = """
import sys, threading, time, warnings, logging
from rlhf_ray.observability.non_blocking_output import drain_output, use_non_blocking_output
from rlhf_ray.observability.progress import StageProgress
use_non_blocking_output()
try:
    with StageProgress("ppo", total=3) as progress:
        for step in range(1, 4):
            progress.update(step, loss=1.0)
            print("x" * 5000)
            print("y" * 5000, file=sys.stderr)
            logging.getLogger("a").warning("z" * 5000)
            warnings.warn("w" * 5000)
            time.sleep(0.05)
    open(sys.argv[1], "w").write("whole")
finally:
    drain_output()
sys.exit(69)
"""


def end_of(place, stdout, stderr, before=""):
    """Exit code of the program with these streams; it has written its file."""
    file = place / "result"
    process = subprocess.Popen(["bash", "-c", f'{before} exec "$@"', "-", sys.executable, "-c", PROGRAM, str(file)],
                               stdout=stdout, stderr=stderr)
    try:
        code = process.wait(60)
    finally:
        process.kill()
    assert file.read_text() == "whole"
    return code


def test_a_process_whose_output_fails_ends_as_it_would_have(tmp_path):
    read, closed = os.pipe()
    os.close(read)
    errors = tmp_path / "errors"
    with open(errors, "wb") as stderr:
        assert end_of(tmp_path, closed, stderr) == 69
    assert "BrokenPipe" not in errors.read_text() and "Traceback" not in errors.read_text()
    assert end_of(tmp_path, closed, closed) == 69


def test_a_process_whose_output_nobody_reads_ends(tmp_path):
    _, full = os.pipe()
    os.set_blocking(full, False)
    try:
        while True:
            os.write(full, bytes(4096))
    except BlockingIOError:
        os.set_blocking(full, True)
    assert end_of(tmp_path, full, full) == 69


def test_a_process_that_is_started_with_closed_output_gives_its_files_other_descriptors(tmp_path):
    assert end_of(tmp_path, None, None, "exec >&- 2>&-;") == 69


def test_a_full_disk_under_both_outputs(tmp_path):
    with open("/dev/full", "wb") as full:
        assert end_of(tmp_path, full, full) == 69


@pytest.mark.parametrize("arguments", [["--help"], ["ppo", "--help-all"], ["ledger", "--help"]])
def test_a_command_whose_reader_has_enough_says_nothing_of_it(arguments):
    read, closed = os.pipe()
    os.close(read)
    ended = subprocess.run([sys.executable, "-m", "rlhf_ray.cli.main", *arguments], stdout=closed,
                           stderr=subprocess.PIPE, timeout=60, check=False)
    assert ended.stderr == b"" and ended.returncode in (0, 1, 128 + signal.SIGPIPE)


ENDS = {
    "an error": "raise ZeroDivisionError('LAST')",
    "an exit with a text": "sys.exit('LAST')",
    "an exit after a line": "print('LAST', file=sys.stderr); sys.exit(3)",
    "an interruption": "raise KeyboardInterrupt('LAST')",
    "a thread that outlives the main one":
        "threading.Thread(target=lambda: (time.sleep(0.1), print('LAST', file=sys.stderr))).start()",
    "a thread's error": "threading.Thread(target=lambda: 1 / 0, name='LAST').start()",
    "a handler of atexit": "atexit.register(lambda: print('LAST', file=sys.stderr))",
    "a handler of atexit that was there before": "BEFORE.append(lambda: print('LAST', file=sys.stderr))",
    "an error of a handler": "atexit.register(lambda: 1 / len(''), )  # LAST",
    "an object that goes with its module":
        "class Kept:\n    def __del__(self, file=sys.stderr): file.write('LAST\\n')\nkept = Kept()",
    "an end without the interpreter's": "print('LAST', file=sys.stderr); drain_output(); os._exit(4)",
    "a long last line": "print('x' * 300_000 + 'LAST', file=sys.stderr)",
}
TO_THE_END = """
import atexit, os, sys, threading, time
BEFORE = []
atexit.register(lambda: [each() for each in BEFORE])
from rlhf_ray.observability.non_blocking_output import drain_output, use_non_blocking_output
use_non_blocking_output()
print("first", file=sys.stderr)
"""


@pytest.mark.parametrize("end", ENDS, ids=lambda name: name.replace(" ", "_"))
def test_what_is_printed_last_is_not_lost(tmp_path, end):
    """To a pipe that is read slowly, and to a file; each several times, because it depends on the moment."""
    program = tmp_path / "program.py"
    program.write_text(TO_THE_END + ENDS[end])
    command = [sys.executable, str(program)]
    files = [open(tmp_path / f"output {number}", "w+b") for number in range(4)]  # noqa: SIM115
    to_files = [subprocess.Popen(command, stderr=file) for file in files]
    to_pipes = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(4)]
    texts = [slowly(process.stderr) for process in to_pipes]
    for process, file in zip(to_files, files, strict=True):
        process.wait(60)
        file.seek(0)
        texts.append(file.read().decode())
    for text in texts:
        assert text.startswith("first") and ("LAST" in text or "ZeroDivisionError" in text)


def slowly(pipe):
    """What comes out of a pipe until it closes, read at 2 MB/s."""
    parts = []
    while part := os.read(pipe.fileno(), 20_000):
        parts.append(part)
        time.sleep(0.01)
    pipe.close()
    return b"".join(parts).decode()


def test_a_process_that_nobody_reads_ends_after_a_while(tmp_path):
    reader, writer = os.pipe()
    program = TO_THE_END + "atexit.register(lambda: print('y' * 1000, file=sys.stderr))\nprint('x' * 900_000, "\
        "file=sys.stderr)\nBEFORE.append(lambda: print('z' * 1000, file=sys.stderr))\nsys.exit(3)"
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", program], stderr=writer)
    assert process.wait(60) == 3 and time.monotonic() - began < 5 * DRAIN_S
    os.close(reader)
    os.close(writer)


def test_a_stream_that_sends_text_elsewhere_than_to_its_descriptor_gets_the_text():
    """As a notebook's: its descriptor is the terminal of the program that serves it."""

    class OfNotebook(io.StringIO):
        def fileno(self):
            return writer

    reader, writer = os.pipe()
    stream = OfNotebook()
    with StageProgress("PPO", 1, stream=stream) as progress:
        progress.update(1)
    os.close(writer)
    assert "PPO: step 1/1" in stream.getvalue() and os.read(reader, 100) == b""
    os.close(reader)
