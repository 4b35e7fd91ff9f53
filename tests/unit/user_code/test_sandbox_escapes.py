"""Ways out of the sandbox, each tried inside, where it fails, and outside, where the same code succeeds.

Each program prints "yes" when it got out. Bombs are small: they show the limit, and outside they end by themselves.
"""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rlhf_ray.user_code import sandbox_files, sandbox_identity
from rlhf_ray.user_code import sandbox_kernel as kernel
from rlhf_ray.user_code.sandbox import Job, Limits
from tests.unit.user_code.conftest import SANDBOXES

ROOT = os.geteuid() == 0
pytestmark = pytest.mark.skipif(kernel.landlock_abi() < kernel.LEAST_ABI or bool(kernel.seccomp_problem()),
                                reason="Landlock or seccomp is missing here")
as_root = pytest.mark.skipif(not ROOT, reason="processes that a program starts need another user, which root gives")
SEVERAL = {"max_processes": 8}


def inside(code, timeout_s=10.0, then=lambda outcome: None, tests=None, **limits):
    """The outcome of a program; `then` is called with it while the worker still lives."""

    job = Job(code, timeout_s, tests=tests)
    outcome = SANDBOXES.run(job, Limits(**limits))
    then(outcome)
    after = SANDBOXES.run(Job("print('next')"), Limits(**limits))
    assert after.output == "next\n"  # nothing has broken the worker
    return outcome


def outside(code, tmp_path):
    """What the same program prints without a sandbox."""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=20,
                          start_new_session=True)
    return done.stdout


def held(code, tmp_path, **limits):
    """Assert that a program gets out only outside."""
    assert outside(code, tmp_path) == "yes\n"
    outcome = inside(code, **limits)
    assert "yes" not in outcome.output, outcome
    return outcome


@pytest.fixture
def secret(tmp_path):
    """A file of the run, which everybody may read, in directories that everybody may enter."""
    directory = Path(tempfile.mkdtemp(prefix="a-run-"))
    directory.chmod(0o777)
    file = directory / "secret"
    file.write_text("yes")
    file.chmod(0o666)
    yield file
    shutil.rmtree(directory)


ENDED = "import os, sys, socket, time, ctypes, subprocess, signal, struct\n"


# Files


@as_root
@pytest.mark.skipif(not Path("/etc/shadow").exists(), reason="there is no /etc/shadow")
def test_passwords_are_not_read(tmp_path):
    held("print('yes' if open('/etc/shadow').read() else 'empty')", tmp_path)


def test_a_file_of_the_run_is_not_read(tmp_path, secret):
    assert held(f"print(open({str(secret)!r}).read())", tmp_path).errors.endswith(f"denied: '{secret}'\n")


def test_the_environment_of_the_parent_is_not_read(tmp_path):
    """Nor that of any process, by /proc."""
    held("import glob, os\n"
         "for file in glob.glob('/proc/[0-9]*/environ') + [f'/proc/{os.getppid()}/environ']:\n"
         "    try: found = open(file, 'rb').read()\n    except OSError: continue\n"
         "    if b'PATH' in found:\n        print('yes'); break", tmp_path)


def test_the_environment_is_clean(monkeypatch):
    monkeypatch.setenv("A_SECRET_TOKEN", "yes")
    found = inside("import os; print(sorted(os.environ))").output
    assert found == str(sorted(["PATH", "HOME", "TMPDIR", "LANG", "PYTHONHASHSEED", "OPENBLAS_NUM_THREADS",
                                "OMP_NUM_THREADS", "MKL_NUM_THREADS"])) + "\n"


@pytest.mark.parametrize("code", [
    "open({file!r}, 'w').write('x')", "open({file!r}, 'a').write('x')", "os.truncate({file!r}, 0)",
    "os.unlink({file!r})", "os.rename({file!r}, {file!r} + '2')", "os.open({file!r}, os.O_RDONLY | os.O_TRUNC)",
    "os.mkdir({file!r} + '3')", "open({file!r} + '4', 'w')", "os.mkfifo({file!r} + '5')",
    "os.chmod({file!r}, 0o600)", "os.utime({file!r}, (1, 1))", "os.listdir(os.path.dirname({file!r}))",
    "os.setxattr({file!r}, 'user.x', b'1')",
])
def test_nothing_outside_is_changed_or_listed(tmp_path, secret, code):
    code = ENDED + code.format(file=str(secret)) + "\nprint('yes')"
    before = secret.stat()
    outcome = inside(code)
    assert "yes" not in outcome.output and outcome.status == 1
    after = secret.stat()
    assert (after.st_mode, after.st_size, after.st_mtime) == (before.st_mode, before.st_size, before.st_mtime)
    assert [each.name for each in secret.parent.iterdir()] == ["secret"]
    if "xattr" not in code or sys.platform != "linux":
        assert outside(code, tmp_path) == "yes\n"


@pytest.mark.parametrize("make", ["os.symlink({file!r}, 'link')", "os.link({file!r}, 'link')"])
def test_a_link_leads_nowhere(tmp_path, secret, make):
    held(ENDED + make.format(file=str(secret)) + "\nprint(open('link').read())", secret.parent)


def test_a_link_left_behind_is_not_followed_when_files_are_removed(secret):
    code = f"import os; os.symlink({str(secret.parent)!r}, 'link'); os.makedirs('a/b'); open('a/b/c', 'w'); print(1)"
    assert inside(code).output == "1\n"
    assert secret.read_text() == "yes"


def test_shared_memory_is_not_used(tmp_path):
    held("f = open('/dev/shm/rlhf-ray-test', 'w'); f.write('x'); f.close()\n"
         "import os; os.unlink('/dev/shm/rlhf-ray-test'); print('yes')", tmp_path)


@pytest.mark.parametrize(("call", "number"), [
    ("shmget", "29, 0, 4096, 0o1600"), ("msgget", "68, 0, 0o1600"), ("semget", "64, 0, 1, 0o1600"),
    ("memfd_create", "319, b'x', 0")])
def test_memory_that_outlives_a_program_is_not_made(tmp_path, call, number):
    remove = {"shmget": "libc.shmctl(made, 0, 0)", "msgget": "libc.msgctl(made, 0, 0)",
              "semget": "libc.semctl(made, 0, 0)", "memfd_create": "0"}[call]
    held(f"import ctypes\nlibc = ctypes.CDLL(None)\nmade = libc.syscall({number})\n"
         f"if made >= 0:\n    {remove}; print('yes')", tmp_path)


@as_root
def test_a_setuid_file_gives_nothing_and_does_not_stay(tmp_path):
    """A program may mark a file of its own; nobody can reach it, and it is gone with the program."""
    code = "import os; open('x', 'w').close(); os.chmod('x', 0o6755); print(os.path.abspath('x'))"
    outcome = inside(code)
    assert outcome.status == 0 and not os.path.exists(outcome.output.strip())


@as_root
def test_a_setuid_program_gives_no_rights(tmp_path):
    code = ENDED + "print(subprocess.run(['/usr/bin/su', '-c', 'id -u'], capture_output=True, text=True).stdout)"
    assert "0" not in inside(code, **SEVERAL).output
    assert inside("import os; print(os.getresuid()[0] >= 61184, os.getgroups())").output == "True []\n"


@as_root
def test_it_keeps_no_capability_but_to_pass_directories():
    """As /proc has it, which a program itself cannot read."""
    code = "import os, time; print(os.getuid(), flush=True); time.sleep(3)"

    async def live():
        running = asyncio.create_task(SANDBOXES.of(Limits()).run(Job(code)))
        await asyncio.sleep(1.0)
        found = [text for each in Path("/proc").glob("[0-9]*/status")
                 if (text := _text(each)) and int(text.split("Uid:")[1].split()[0]) in sandbox_identity.UIDS]
        return found, int((await running).output)

    SANDBOXES.of(Limits())
    found, user = SANDBOXES.call(live())
    mine = [text for text in found if f"Uid:\t{user}\t{user}\t{user}" in text]
    assert len(mine) == 1
    kept = {1 << kernel.CAP_DAC_READ_SEARCH, 0}
    for line in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert int(mine[0].split(f"{line}:\t")[1].split()[0], 16) in kept
    assert "NoNewPrivs:\t1" in mine[0] and "Seccomp:\t2" in mine[0]


def _text(file):
    try:
        return file.read_text()
    except OSError:
        return ""


# The network


@pytest.fixture
def listener():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_tcp_on_loopback_is_not_reached(tmp_path, listener):
    held(f"import socket; socket.create_connection(('127.0.0.1', {listener}), 2); print('yes')", tmp_path)


@pytest.mark.parametrize("code", [
    "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))",
    "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)", "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()",
    "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)", "socket.getaddrinfo('localhost', 80)",
])
def test_there_are_no_sockets(tmp_path, code):
    if "getaddrinfo" in code:  # without names of this machine, an answer would need the network
        assert inside(ENDED + code + "\nprint('yes')").status == 1
        return
    held(ENDED + code + "\nprint('yes')", tmp_path)


@pytest.mark.parametrize("abstract", [False, True])
def test_unix_sockets_are_not_reached(tmp_path, secret, abstract):
    name = f"\0rlhf-ray-test-{os.getpid()}" if abstract else str(secret.parent / "socket")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        if not abstract:
            os.chmod(name, 0o777)
        held(f"import socket; socket.socket(socket.AF_UNIX).connect({name!r}); print('yes')", tmp_path)


def test_a_pair_of_sockets_reaches_nobody_else(tmp_path, secret):
    name = str(secret.parent / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(name)
        os.chmod(name, 0o777)
        held(f"import socket; a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
             f"a.sendto(b'x', {name!r}); print('yes')", tmp_path)


# Processes


def test_no_other_process_is_started(tmp_path):
    held(ENDED + "pid = os.fork()\nif pid == 0: os._exit(0)\nos.waitpid(pid, 0); print('yes')", tmp_path)
    held(ENDED + "subprocess.run(['/bin/true'], check=True); print('yes')", tmp_path)
    held(ENDED + "print('yes' if os.system('true') == 0 else 'no')", tmp_path)


BOMB = ENDED + """
made = 0
try:
    for _ in range(40):
        if os.fork() == 0:
            time.sleep(3); os._exit(0)
        made += 1
except OSError: pass
print('yes' if made == 40 else made, flush=True)
"""


@as_root
def test_a_fork_bomb_is_bounded_and_killed(tmp_path):
    outcome = held(BOMB, tmp_path, **SEVERAL)
    assert outcome.output == "7\n"


def beats(file):
    """Whether something still writes into a file."""
    before = file.stat().st_size
    time.sleep(0.3)
    return file.stat().st_size > before


DAEMON = ENDED + """
if os.fork() == 0:
    os.setsid()
    if os.fork(): os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN); os.close(1); os.close(2)
    for _ in range(300):
        with open({file!r}, 'a') as f: f.write('.')
        time.sleep(0.01)
    os._exit(0)
os.wait()
while not os.path.exists({file!r}): time.sleep(0.01)
print(os.getuid())
"""


@as_root
def test_a_daemon_does_not_survive(tmp_path):
    """It is alone in a session, and its parent has ended."""
    file = tmp_path / "beats"
    assert outside(DAEMON.format(file=str(file)), tmp_path)
    assert beats(file)
    outcome = inside(DAEMON.format(file="beats"), then=lambda outcome: nothing_runs_as(outcome.output), **SEVERAL)
    assert outcome.output.strip().isdecimal() and outcome.status == 0


def nothing_runs_as(user):
    """No process of this user is there, zombies included."""
    assert int(user) in sandbox_identity.UIDS
    states = []
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if each.stat().st_uid == int(user) or f"Uid:\t{int(user)}\t" in (each / "status").read_text():
                states.append(each.name)
    assert states == []


@as_root
def test_processes_that_start_each_other_are_killed():
    """Each lives for a moment, so that a list of them is old when it is read."""
    code = ENDED + """
if os.fork() == 0:
    os.setsid()
    while os.fork() == 0:
        time.sleep(0.002)
    os._exit(0)
time.sleep(0.2)
print(os.getuid())
"""
    inside(code, then=lambda outcome: nothing_runs_as(outcome.output), **SEVERAL)


@pytest.fixture
def neighbour():
    """A process of this user, which everything may happen to."""
    with subprocess.Popen(["sleep", "30"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("several", [False, pytest.param(True, marks=as_root)])
@pytest.mark.parametrize("code", [
    "os.kill({pid}, signal.SIGTERM)", "signal.pidfd_send_signal(os.pidfd_open({pid}), signal.SIGTERM)",
    "os.kill(os.getppid(), 0)", "os.sched_setaffinity({pid}, {{0}})",
    "os.setpriority(os.PRIO_PROCESS, {pid}, 5)",
    "import resource; resource.prlimit({pid}, resource.RLIMIT_CORE, (0, 0))",
    "assert ctypes.CDLL(None).syscall(101, 16, {pid}, 0, 0) == 0",  # PTRACE_ATTACH
    "import fcntl; r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, {pid})",
])
def test_other_processes_are_not_touched(tmp_path, neighbour, code, several):
    code = ENDED + code.format(pid=neighbour.pid) + "\nprint('yes')"
    outcome = inside(code, **(SEVERAL if several else {}))
    if "F_SETOWN" in code and several:
        assert neighbour.poll() is None
        return
    assert "yes" not in outcome.output and outcome.status == 1, outcome
    assert neighbour.poll() is None
    assert outside(code, tmp_path) == "yes\n"


def test_signals_to_its_group_reach_itself_alone():
    """It has a session of its own: its group is not its worker's."""
    outcome = inside("import os\nprint(os.getpgrp() == os.getpid() == os.getsid(0), flush=True)\nos.killpg(0, 9)")
    assert outcome.output == "True\n"
    assert outcome.status in (-9, 1)


@as_root
def test_no_zombie_is_left():
    code = ENDED + "for _ in range(4):\n    if os.fork() == 0: os._exit(0)\nprint(os.getuid())"
    inside(code, then=lambda outcome: nothing_runs_as(outcome.output), **SEVERAL)


@pytest.mark.parametrize(("name", "call"), [
    ("ptrace", "101, 0, 0, 0, 0"), ("unshare a user namespace", "272, 0x10000000"), ("userfaultfd", "323, 1"),
    ("io_uring_setup", "425, 4, ctypes.create_string_buffer(120)"), ("bpf", "321, 0, 0, 0"),
    ("keyctl", "250, 0, -3, 1"), ("add_key", "248, b'user', b'rlhf-ray', b'x', 1, -3"),
    ("mount", "165, b'none', b'/tmp', b'tmpfs', 0, 0"), ("kexec_load", "246, 0, 0, 0, 0"),
    ("process_vm_readv", "310, os.getpid(), 0, 0, 0, 0, 0"), ("perf_event_open", "298, 0, 0, -1, -1, 0"),
    ("setns", "308, -1, 0"), ("pivot_root", "155, b'a', b'b'"), ("chroot", "161, b'/'"), ("reboot", "169, 0, 0, 0"),
    ("open_by_handle_at", "304, -1, 0, 0"), ("clone3", "435, 0, 0"), ("seccomp", "317, 2, 0, 0"),
    ("landlock_create_ruleset", "444, 0, 0, 1"), ("of x32", "0x40000000 + 39"), ("pidfd_getfd", "438, 0, 0, 0"),
])
def test_system_calls_that_programs_do_not_need_are_refused(name, call):
    """By the filter, before the kernel looks at their arguments."""
    code = ENDED + f"libc = ctypes.CDLL(None, use_errno=True)\nprint(libc.syscall({call}), ctypes.get_errno())"
    assert inside(code).output in ("-1 1\n", "-1 38\n")  # EPERM, ENOSYS


@pytest.mark.parametrize("call", [
    "272, 0x00000400", "425, 4, ctypes.create_string_buffer(120)", "444, 0, 0, 1", "310, os.getpid(), 0, 0, 0, 0, 0",
    "317, 2, 0, ctypes.create_string_buffer(b'\\0\\0\\0\\x80', 4)"])
def test_those_calls_work_outside(tmp_path, call):
    """unshare, io_uring_setup, seccomp, landlock and process_vm_readv, so that it is the filter that refuses them."""
    code = ENDED + f"print('yes' if ctypes.CDLL(None, use_errno=True).syscall({call}) >= 0 else ctypes.get_errno())"
    if outside(code, tmp_path) != "yes\n":
        pytest.skip("this machine refuses it to everybody")
    assert "yes" not in inside(code).output


def test_limits_are_not_raised(tmp_path):
    held("import resource\nresource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)\nprint('yes')",
         tmp_path) if ROOT else None
    assert "yes" not in inside("import resource\nfor limit in (resource.RLIMIT_AS, resource.RLIMIT_CPU, "
                               "resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):\n"
                               "    soft, hard = resource.getrlimit(limit)\n"
                               "    try: resource.setrlimit(limit, (soft, hard + 1)); print('yes')\n"
                               "    except (ValueError, OSError): pass").output


def test_descriptors_are_not_inherited(tmp_path, secret):
    """Standard ones, the job and its channel; here a file that is open and inheritable in this process."""
    with secret.open() as file:
        os.set_inheritable(file.fileno(), True)
        code = ("import os\nfound = []\nfor n in range(300):\n    try: os.fstat(n); found.append(n)\n"
                "    except OSError: pass\nprint(found)")
        outcome = inside(code)
    assert outcome.output == "[0, 1, 2]\n"


# Bounds


def test_a_memory_bomb_gets_an_error(tmp_path):
    code = "kept = []\nfor _ in range(400): kept.append(bytearray(1 << 20))\nprint('yes')"
    assert held(code, tmp_path, memory_mib=256).errors.endswith("MemoryError\n")


def test_shared_mappings_count_as_memory(tmp_path):
    code = "import mmap\nkept = [mmap.mmap(-1, 1 << 20) for _ in range(400)]\nprint('yes')"
    held(code, tmp_path, memory_mib=256)


@as_root
def test_a_memory_bomb_of_several_processes_is_killed(tmp_path):
    if sandbox_identity.ControlGroup(1 << 28, 8).missing:
        pytest.skip("no cgroup can be made here")
    code = ENDED + ("for _ in range(5):\n    if os.fork() == 0:\n        kept = b'x' * (70 << 20); time.sleep(1)\n"
                    "        os._exit(0)\ncodes = [os.wait()[1] for _ in range(5)]\n"
                    "print('yes' if not any(codes) else codes)")
    assert outside(code, tmp_path) == "yes\n"
    assert "yes" not in inside(code, memory_mib=200, max_processes=8).output


@pytest.mark.parametrize("code", [
    "open('x', 'wb').write(b'x' * (9 << 20))",
    "for n in range(60):\n    open(str(n), 'wb').write(b'x' * (1 << 18))\nimport time; time.sleep(1)",
    "for n in range(4000):\n    open(str(n), 'wb').close()\nimport time; time.sleep(1)",
    "kept = []\nimport os, time\nfor n in range(30):\n    kept.append(open(str(n), 'wb')); os.unlink(str(n))\n"
    "    kept[-1].write(b'x' * (1 << 19)); kept[-1].flush()\ntime.sleep(1)",
    "import os\nfor n in range(60):\n    os.mkdir('d' * 100); os.chdir('d' * 100)\nimport time; time.sleep(1)",
], ids=["large", "many", "empty", "nameless", "deep"])
def test_a_disk_bomb_is_killed_and_removed(tmp_path, code):
    code += "\nprint('yes')"
    before = set(Path(tempfile.gettempdir()).glob(f"{sandbox_files.PREFIX}*/*"))
    held(code, tmp_path, disk_mib=8)
    assert not set(Path(tempfile.gettempdir()).glob(f"{sandbox_files.PREFIX}*/*")) - before
    sandbox_files.remove(str(tmp_path))


def test_a_loop_is_killed_at_its_deadline(tmp_path):
    began = time.monotonic()
    outcome = inside("while True: pass", timeout_s=0.5)
    assert outcome.killed == "time" and time.monotonic() - began < 8


@pytest.mark.parametrize("code", [
    "import time; time.sleep(60)", "import signal; signal.pthread_sigmask(1, {15, 2}); signal.pause()",
    "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()",
    "import os, time; os.close(1); os.close(2); time.sleep(60)",
    "import atexit, time; atexit.register(time.sleep, 60)"])
def test_what_does_not_end_is_killed_at_its_deadline(code):
    assert inside(code, timeout_s=0.5).killed == "time"


@pytest.mark.parametrize("where", [1, 2])
def test_a_flood_is_cut_and_killed(tmp_path, where):
    outcome = inside(f"import os\nwhile True: os.write({where}, b'x' * 9999)", output_kib=64)
    assert outcome.killed == "output"
    assert len(outcome.output) + len(outcome.errors) == 64 << 10


def test_a_flood_in_its_channel_is_killed():
    outcome = inside("import os\nwhile True: os.write(4, b'x' * 9999)", tests="assert True", output_kib=64)
    assert outcome.killed == "output" and outcome.verdict is None
