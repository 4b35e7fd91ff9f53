"""What a program does in a sandbox: what it prints, how it ends, what stays of it, and what a missing rung means."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from rlhf_ray.user_code import sandbox_kernel as kernel
from rlhf_ray.user_code import sandbox_process
from rlhf_ray.user_code.process import PrintedLines
from rlhf_ray.user_code.sandbox import Job, Limits, Sandbox, SandboxBroken, SandboxPool
from tests.unit.user_code.conftest import SANDBOXES

pytestmark = pytest.mark.skipif(kernel.landlock_abi() < kernel.LEAST_ABI or bool(kernel.seccomp_problem()),
                                reason="Landlock or seccomp is missing here")


def inside(job, turns=(), **limits):
    """The outcome of a job, or those of a session's turns."""

    limits = Limits(**limits)
    if turns:
        outcomes = [SANDBOXES.call(SANDBOXES.of(limits).turn(code, 5.0)) for code in turns]
        SANDBOXES.call(SANDBOXES.of(limits).turn("import os; os._exit(0)", 5.0))
        return outcomes
    return SANDBOXES.run(job if isinstance(job, Job) else Job(job), limits)


def test_a_program_prints_and_reads_its_input():
    outcome = inside(Job("import sys\nprint(int(input()) + 1)\nprint('ü', file=sys.stderr)", stdin="41\n"))
    assert (outcome.status, outcome.output, outcome.errors) == (0, "42\n", "ü\n")
    assert outcome.killed == "" and 0 < outcome.seconds < 5


def test_without_input_stdin_is_at_its_end():
    assert inside("import sys; print(repr(sys.stdin.read()))").output == "''\n"


def test_a_traceback_begins_in_the_program():
    outcome = inside("def f():\n    return 1 / 0\nf()")
    assert outcome.status == 1
    assert outcome.errors.splitlines()[1] == '  File "program.py", line 3, in <module>'
    assert outcome.errors.splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_an_error_of_syntax_is_shown():
    assert inside("x = = 1").errors.splitlines()[-1] == "SyntaxError: invalid syntax"


def test_the_exit_code_is_the_programs():
    assert inside("import sys; sys.exit(3)").status == 3
    assert inside("import os; os.abort()").status == -6


def test_installed_packages_can_be_imported():
    assert inside("import numpy; print(numpy.arange(3).sum())").output == "3\n"


def test_asyncio_threads_and_files_work():
    code = """
import asyncio, tempfile, threading
async def main():
    await asyncio.sleep(0)
    return await asyncio.to_thread(lambda: 5)
print(asyncio.run(main()))
with tempfile.TemporaryDirectory() as d, open(d + "/x", "w+") as f:
    f.write("a"); f.seek(0); print(f.read())
"""
    assert inside(code).output == "5\na\n"


def test_the_same_program_prints_the_same_in_each_run():
    """Hashes of texts are not random, so that an episode can be replayed."""
    code = "print({'a', 'b', 'c', 'd'}, hash('x'))"
    assert inside(code).output == inside(code).output


def test_asserts_that_hold_give_a_verdict():
    assert inside(Job("def f(x): return x + 1", tests="assert f(1) == 2")).verdict == ""


@pytest.mark.parametrize("code", [
    "def f(x): return x", "raise SystemExit(0)", "import os; os._exit(0)", "def f(x):\n import os; os._exit(0)",
    "def f(x): raise SystemExit(0)", "import os; os.write(4, b'loaded\\n'); os.write(4, b'0' * 32 + b'\\n')",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "print('passed')\nprint('')", "f = (",
])
def test_no_verdict_without_the_asserts(code):
    assert inside(Job(code, tests="assert f(1) == 2")).verdict is None


def test_a_call_gives_its_result_as_json():
    job = Job("class Solution:\n def f(self, a, b): return (a, [b])", function="f", arguments=[1, "x"])
    assert inside(job).verdict == '[1, ["x"]]'


def test_the_program_does_not_see_what_is_wanted_until_it_is_loaded():
    """Its job has nothing of the tests."""
    code = ("import os\nos.set_blocking(3, False)\ntry: print(os.read(3, 9999), flush=True)\n"
            "except BlockingIOError: print('nothing', flush=True)")  # it is killed once its verdict is there
    assert inside(Job(code, tests="assert True")).output == "nothing\n"


def test_turns_of_a_session_share_names_and_files():
    outcomes = inside("", turns=["x = 1; open('a', 'w').write('b')", "print(x, open('a').read())", "1 / 0", "print(x)"])
    assert [each.output for each in outcomes] == ["", "1 b\n", "", "1\n"]
    assert outcomes[2].errors.endswith("ZeroDivisionError: division by zero\n")
    assert {each.status for each in outcomes} == {None}


@pytest.mark.parametrize("processes", [1, pytest.param(4, marks=pytest.mark.skipif(
    os.geteuid() != 0, reason="several processes need another user"))])
def test_a_session_stands_still_between_its_turns(processes):
    counts = ("import threading, time, os\nn = [0]\n"
              "def count():\n while True:\n  n[0] += 1\n  with open('m', 'w') as file: file.write(str(n[0]))\n"
              "  os.replace('m', 'n')\n  time.sleep(0.01)\n"
              + ("threading.Thread(target=count, daemon=True).start()" if processes == 1 else
                 "if os.fork() == 0: count()"))

    async def live():
        sandbox = Sandbox("a test", Limits(max_processes=processes), PrintedLines("", ""))
        try:
            await sandbox.turn(counts + "\ntime.sleep(0.2)", 5.0)
            await asyncio.sleep(1.0)
            seen = [await sandbox.turn("print(open('n').read())", 5.0),
                    await sandbox.turn("time.sleep(0.5)\nprint(open('n').read())", 5.0)]
            return [int(each.output) for each in seen]
        finally:
            await sandbox.stop()

    early, late = SANDBOXES.call(live())
    assert 2 <= early < 40 and late > early, "it goes on in the next turn, from where it was"


def test_the_files_of_a_short_turn_are_measured():
    turn = "import os\nopen(os.urandom(4).hex(), 'wb').write(bytes(700_000))"
    outcomes = inside("", turns=[turn, turn, "print(len(os.listdir('.')))"], disk_mib=1)
    assert [(each.killed, each.status) for each in outcomes[:2]] == [("", None), ("disk", -9)]
    assert "NameError" in outcomes[2].errors, "it has begun anew"


def test_a_session_that_ended_begins_anew():
    outcomes = inside("", turns=["x = 1", "import os; os._exit(4)", "print('x' in globals())"])
    assert outcomes[1].status == 4
    assert outcomes[2].output == "False\n"


def test_programs_run_side_by_side():
    async def live():
        async with SandboxPool("a test", Limits(), 3, PrintedLines("", "")) as pool:
            await asyncio.gather(*(pool.run(Job("pass")) for _ in range(3)))  # all workers are started
            began = time.monotonic()
            await asyncio.gather(*(pool.run(Job("import time; time.sleep(1.5)")) for _ in range(3)))
            return time.monotonic() - began

    assert asyncio.run(live()) < 4.0


def test_a_worker_that_was_killed_is_replaced():
    async def live():
        sandbox = Sandbox("a test", Limits(), PrintedLines("", ""))
        await sandbox.start()
        try:
            os.kill(sandbox._process.pid, 9)
            return await sandbox.run(Job("print(1)"))
        finally:
            await sandbox.stop()

    assert asyncio.run(live()).output == "1\n"


def test_a_program_whose_worker_is_lost_each_time_is_an_error(monkeypatch):
    async def live():
        sandbox = Sandbox("a test", Limits(), PrintedLines("", ""))
        exchange = sandbox._exchange

        async def lost(message, timeout_s):
            if "code" in message:
                os.kill(sandbox._process.pid, 9)
            return await exchange(message, timeout_s)

        monkeypatch.setattr(sandbox, "_exchange", lost)
        try:
            await sandbox.run(Job("print(1)"))
        finally:
            await sandbox.stop()

    with pytest.raises(SandboxBroken, match="lost 2 times"):
        asyncio.run(live())


def test_a_cancelled_program_ends_with_its_files():
    async def live():
        sandbox = Sandbox("a test", Limits(), PrintedLines("", ""))
        await sandbox.start()
        try:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.7):
                    await sandbox.run(Job("import time; time.sleep(987)", timeout_s=60))
            commands = [each.read_bytes() for each in Path("/proc").glob("[0-9]*/cmdline") if each.exists()]
            assert not any(b"sleep(987)" in each for each in commands)
            return await sandbox.run(Job("print(2)"))
        finally:
            await sandbox.stop()

    assert asyncio.run(live()).output == "2\n"


# Rungs


def broken(monkeypatch, missing, **setup):
    """The message with which a worker refuses when these rungs are missing; in a copy of this process, because it waits
    for all its children."""
    look = sandbox_process.Worker._look
    monkeypatch.setattr(sandbox_process.Worker, "_look", lambda self: {**look(self), **missing})
    given = {"memory_mib": 512, "disk_mib": 8, "output_kib": 8, "max_processes": 1, "allow_missing": [], **setup}
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            sandbox_process.Worker(**given)
        except sandbox_process.Broken as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        text = told.read()
    os.waitpid(pid, 0)
    return text


@pytest.mark.parametrize(("rung", "holds"), [("landlock", "files"), ("seccomp", "the network")])
def test_a_missing_rung_is_refused_and_named(monkeypatch, rung, holds):
    text = broken(monkeypatch, {rung: "the kernel has none"})
    assert f"{rung}, which holds programs back from {holds}" in text and "the kernel has none" in text
    assert f"allow_missing: ['{rung}']" in text


@pytest.mark.parametrize("rung", ["landlock", "seccomp"])
def test_a_missing_rung_can_be_allowed(monkeypatch, rung):
    """The worker then says what it does without, and its programs run; unless Python is in root's own directory, which
    nothing but Landlock confines."""
    private = os.geteuid() == 0 and any(not each.stat().st_mode & 1 for each in Path(sandbox_process.PYTHON).parents)
    text = broken(monkeypatch, {rung: "the kernel has none"}, allow_missing=[rung])
    if rung == "landlock" and private:
        assert "without landlock nothing else holds back" in text
    else:
        assert text == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user needs no other one")
def test_root_needs_another_user(monkeypatch):
    assert "uid, which holds programs back from what belongs to root" in broken(monkeypatch, {"uid": "none is free"})


def test_several_processes_need_another_user(monkeypatch):
    text = broken(monkeypatch, {"uid": "only root can"}, max_processes=4, allow_missing=["uid"])
    assert "max_processes=4: without another user" in text


def test_a_rung_that_does_not_hold_is_found(monkeypatch):
    monkeypatch.setattr(kernel, "landlock", lambda rights: None)
    assert "found {'landlock': False}" in broken(monkeypatch, {})
    monkeypatch.undo()
    monkeypatch.setattr(kernel, "seccomp", lambda **_: None)
    assert "'seccomp': False" in broken(monkeypatch, {})


def test_an_unknown_machine_has_no_list_of_calls(monkeypatch):
    monkeypatch.setattr(kernel.platform, "machine", lambda: "aarch64")
    assert kernel.seccomp_problem() == "its list of system calls is for x86_64, and this is aarch64"


def test_what_holds_is_reported():
    async def live():
        async with SandboxPool("a test", Limits(), 1, PrintedLines("", "")) as pool:
            return pool._workers[0].rungs

    rungs = asyncio.run(live())
    assert rungs.keys() == {"landlock", "seccomp", "uid", "cgroup"}
    assert rungs["landlock"] == rungs["seccomp"] == ""
    assert (rungs["uid"] == "") == (os.geteuid() == 0)


def test_the_numbers_of_system_calls_are_those_of_the_header():
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("the kernel's headers are not installed")
    known = {words[1].removeprefix("__NR_"): int(words[2]) for line in header.read_text().splitlines()
             if len(words := line.split()) == 3 and words[1].startswith("__NR_")}
    lists = {**kernel._ALLOWED, **kernel._OWN_FILES, **kernel._STARTING}
    assert {name: number for name, number in lists.items() if known.get(name, number) != number} == {}
