"""Signals to this very process, inside its event loop."""

import asyncio
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time

import pytest

from rlhf_ray.coordinator.stop import CHILD, ReceivedSignals, StoppedAtOnce, StopRequest
from rlhf_ray.errors import RunInterrupted, WorkerError


@pytest.fixture(autouse=True)
def handlers_stay_as_they_are():
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(name) for name in names]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the suite may have been started with hangups ignored
    yield
    for name, handler in zip(names, before, strict=True):
        signal.signal(name, handler)


async def kill_and_look(number):
    os.kill(os.getpid(), number)
    for _ in range(100):
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_the_first_signal_is_a_request(name):
    said = []

    async def run():
        stop = StopRequest(said.append)
        stop.can_save = True
        with stop.listening():
            assert stop.requested is None
            await kill_and_look(getattr(signal, name))
            return stop.requested

    assert asyncio.run(run()) == name
    assert said == [f"{name}: saving as soon as the update under way is done; a second signal stops at once"]


@pytest.mark.parametrize("first", ["SIGHUP", "SIGTERM"])
def test_a_hangup_after_another_signal_stops_nothing_at_once(first):
    async def run():
        stop = StopRequest(lambda _: None)
        stop.can_save = True
        with stop.listening():
            await kill_and_look(getattr(signal, first))
            await kill_and_look(signal.SIGHUP)
            return stop.requested

    assert asyncio.run(run()) == first


def test_a_hangup_that_is_ignored_stays_ignored():
    async def run():
        stop = StopRequest(lambda _: None)
        stop.can_save = True
        with stop.listening():
            await kill_and_look(signal.SIGHUP)
            return stop.requested

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert asyncio.run(run()) is None and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_while_there_is_nothing_to_save_the_first_signal_ends_the_work(name):
    said, reached = [], []

    async def run():
        with StopRequest(said.append).listening():
            await kill_and_look(getattr(signal, name))
            reached.append("after the first")

    with pytest.raises(RunInterrupted, match=f"stopped at once by {name}"):
        asyncio.run(run())
    assert not reached and not said


def test_work_is_given_up_when_asked_and_finished_when_not():
    given_up = []

    async def long_work():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            given_up.append(True)
            raise

    async def run():
        stop = StopRequest(lambda _: None)
        stop.can_save = True
        with stop.listening():
            quick = await stop.unless_asked(asyncio.sleep(0, "done"))
            asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), signal.SIGTERM)
            return quick, await stop.unless_asked(long_work())

    assert asyncio.run(run()) == ("done", None)
    assert given_up == [True]


def test_work_that_fails_is_told():
    async def fail():
        raise ValueError("broken")

    async def run():
        await StopRequest(lambda _: None).unless_asked(fail())

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(run())


def test_the_second_signal_ends_the_work():
    said, reached = [], []

    async def run():
        stop = StopRequest(said.append)
        stop.can_save = True
        with stop.listening():
            await kill_and_look(signal.SIGTERM)
            reached.append("after the first")
            await kill_and_look(signal.SIGINT)
            reached.append("after the second")

    with pytest.raises(RunInterrupted, match="stopped at once by SIGINT"):
        asyncio.run(run())
    assert reached == ["after the first"] and len(said) == 1


def test_afterwards_signals_are_the_worlds_again():
    async def run():
        stop = StopRequest(lambda _: None)
        with stop.listening():
            pass
        caught = []
        signal.signal(signal.SIGTERM, lambda *_: caught.append("world"))
        await kill_and_look(signal.SIGTERM)
        return stop.requested, caught

    assert asyncio.run(run()) == (None, ["world"])


def test_a_signal_that_follows_another_s_request_leaves_time_to_save():
    """As machines send it that were told of their end before."""
    said = []

    async def run():
        stop = StopRequest(said.append)
        stop.can_save = True
        with stop.listening():
            stop.ask("the drain of its node")
            await kill_and_look(signal.SIGTERM)
            return stop.requested

    assert asyncio.run(run()) == "SIGTERM"
    assert len(said) == 1 and said[0].startswith("SIGTERM: saving")


def test_one_request_that_comes_twice_within_a_moment_is_one_to_the_child_of_a_parent(monkeypatch):
    """Ray tells all processes of a job, and the parent of `run.auto_resume` passes on what it was told."""
    monkeypatch.setenv(CHILD, "1")
    reached = []

    async def run():
        stop = StopRequest(lambda _: None)
        stop.can_save = True
        with stop.listening():
            await kill_and_look(signal.SIGTERM)
            await kill_and_look(signal.SIGTERM)
            reached.append("after the second")
            await asyncio.sleep(1.0)
            await kill_and_look(signal.SIGTERM)
            reached.append("after another request")

    with pytest.raises(RunInterrupted, match="stopped at once by SIGTERM"):
        asyncio.run(run())
    assert reached == ["after the second"]


IN_A_TERMINAL = """
import asyncio, sys
from pathlib import Path
from rlhf_ray.coordinator.stop import StopRequest
from rlhf_ray.observability.non_blocking_output import drain_output, use_non_blocking_output
from rlhf_ray.observability.progress import StageProgress

async def run():
    with StageProgress("PPO", 9) as progress:
        stop = StopRequest(progress.warn)
        stop.can_save = True
        with stop.listening():
            progress.update(1, loss=1.0)
            Path(sys.argv[1]).write_text("ready")
            await stop.unless_asked(asyncio.sleep(60))
            progress.update(2, loss=1.0)
            print("saving", file=sys.stderr)
            Path(sys.argv[1]).write_text(f"saved after {stop.requested}")

use_non_blocking_output()
try:
    asyncio.run(run())
finally:
    drain_output()
sys.exit(75)
"""


def test_a_process_whose_terminal_is_closed_saves_although_it_cannot_print_any_more(tmp_path):
    ours, its = pty.openpty()

    def lead_a_session():
        os.setsid()
        fcntl.ioctl(its, termios.TIOCSCTTY, 0)

    process = subprocess.Popen([sys.executable, "-c", IN_A_TERMINAL, str(tmp_path / "state")], stdin=its, stdout=its,
                               stderr=its, preexec_fn=lead_a_session)
    os.close(its)
    until = time.monotonic() + 60
    while not (tmp_path / "state").exists() and time.monotonic() < until:
        time.sleep(0.02)
    os.close(ours)
    assert process.wait(60) == 75 and (tmp_path / "state").read_text() == "saved after SIGHUP"


A_COMMAND = """
import asyncio, atexit, os, signal, sys, threading, time
from rlhf_ray.coordinator.stop import OF_COMMAND, StopRequest
from rlhf_ray.errors import RunInterrupted

PLACES, NUMBER = sys.argv[1].split("+"), signal.Signals[sys.argv[2]]

def reach(place):
    print(place, flush=True)
    for _ in range(PLACES.count(place)):
        os.kill(os.getpid(), NUMBER)
        for _ in range(5):
            time.sleep(0.001)

async def loop():
    stop = StopRequest(lambda text: None)
    with stop.listening():
        stop.can_save = True
        reach("loop")
        await asyncio.sleep(0.01)
        reach("saving")
        await asyncio.sleep(0.01)
        if stop.requested:
            raise RunInterrupted("saved")

def at_the_end():
    reach("atexit")
    print("over", flush=True)

def command():
    try:
        reach("start")
        asyncio.run(loop())
    finally:
        try:
            reach("end of the cluster")
            time.sleep(0.01)
        finally:
            print("cleaned", flush=True)
    reach("summary")

atexit.register(at_the_end)
threading.Thread(target=lambda: (threading.main_thread().join(), reach("end of the main thread"))).start()
OF_COMMAND.handle()
try:
    command()
    reach("command's end")
except RunInterrupted as error:
    reach("message")
    sys.exit(error.exit_code)
finally:
    OF_COMMAND.process_ends()
"""
PLACES = ("end of the cluster", "message", "end of the main thread", "atexit")


def ended(places, name="SIGINT"):
    """Exit code of a command that gets signals at these places, and what it reached."""
    done = subprocess.run([sys.executable, "-c", A_COMMAND, "+".join(places), name], capture_output=True, text=True,
                          timeout=60, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("more", [(), *((place,) for place in PLACES), PLACES, 5 * PLACES], ids=len)
def test_a_command_that_was_asked_to_stop_ends_with_one_code_whatever_follows(more, name):
    code, reached = ended(["loop", *more], name)
    assert code == 75 and reached[-1] == "over" and "cleaned" in reached and "summary" not in reached


@pytest.mark.parametrize("places", [
    ("start",), ("start",) * 4, ("loop", "saving"), ("loop", "saving", *PLACES), ("loop",) * 5, ("saving",),
    ("end of the cluster",), ("summary",), ("summary", *PLACES), ("command's end",),
], ids="+".join)
def test_a_command_that_is_stopped_at_once_ends_with_that_code_too(places):
    code, reached = ended(places)
    assert code == 75 and reached[-1] == "over" and "cleaned" in reached


def test_a_signal_after_python_has_removed_its_handlers_changes_nothing():
    end = """
class Kept:
    def __del__(self, sleep=time.sleep, kill=os.kill, pid=os.getpid(), write=os.write):
        write(1, b"late\\n")
        for _ in range(3):
            kill(pid, 2), kill(pid, 15)
sys.kept = Kept()
"""
    program = A_COMMAND.replace("def at_the_end", f"{end}\ndef at_the_end")
    done = subprocess.run([sys.executable, "-c", program, "", "SIGINT"], capture_output=True, text=True, timeout=60,
                          check=False)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "late"


@pytest.mark.parametrize("places", [(), ("end of the main thread", "atexit"), 5 * ("atexit",)], ids=len)
def test_a_command_that_made_all_its_steps_ends_with_0_whatever_follows(places):
    code, reached = ended(places)
    assert code == 0 and reached[-1] == "over"


def test_a_process_that_does_not_end_can_be_ended(monkeypatch):
    monkeypatch.setattr("rlhf_ray.coordinator.stop.END_S", 0.05)
    received = ReceivedSignals()
    received.handle()
    received.process_ends()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


def test_a_stop_at_once_that_was_caught_can_be_repeated(monkeypatch):
    monkeypatch.setattr("rlhf_ray.coordinator.stop.END_S", 0.05)
    received = ReceivedSignals()
    received.handle()
    for _ in range(2):
        with pytest.raises(StoppedAtOnce, match="75"):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)


def test_an_error_of_work_that_is_stopped_at_once_does_not_hide_the_stop():
    async def run():
        with StopRequest(lambda _: None).listening():
            try:
                await kill_and_look(signal.SIGINT)
            except asyncio.CancelledError:
                raise WorkerError("killed meanwhile") from None

    with pytest.raises(RunInterrupted, match="stopped at once by SIGINT"):
        asyncio.run(run())
