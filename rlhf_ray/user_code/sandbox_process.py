"""The worker of a sandbox: it runs one program after the other, each in a new process that cannot reach what is not
its own, and kills all that a program has started when it ends.

Started by a keeper (`user_code.keeper`), with the number of an open socket as its argument; requests are pickles,
answers are JSON. Imports the standard library alone.

What holds a program back are rungs, each tried before the first program:

- landlock: it reads Python's installation, the system's libraries and its own directory, and writes only there. From
  ABI 4 on no TCP; from ABI 6 on no signals to others and no abstract sockets of others.
- seccomp: only listed system calls: no sockets, no tracing, no namespaces, no io_uring; and, as far as nothing else
  holds it to that, no other process.
- uid: another user of its own (where the worker is root), without privileges.
- cgroup: memory and number of all its processes together (where the worker may make one).
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import random
import resource
import secrets
import selectors
import shutil
import signal
import socket
import stat
import sys
import sysconfig
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_ray.user_code import sandbox_kernel as kernel
from rlhf_ray.user_code.frames import print_by_lines, receive, send
from rlhf_ray.user_code.keeper import children, reap
from rlhf_ray.user_code.loading import describe

PREFIX = "rlhf-ray-sandbox-"
UIDS = range(61184, 65520)
"""Users that exist as long as a process: systemd's range for them (DynamicUser), which is within the 65,536 of most
containers."""
LOOK_S = 0.05
"""Pause between two looks at the size of a program's files."""
OLD_S = 60.0
"""Age from which a directory without a lock is one that was left."""
GONE_S = 5.0
"""Longest wait for killed processes to disappear."""
TEST_S = 30.0
"""Time for the program that tries the rungs, on a machine that is busy."""
FILES = 64
"""Files that a process may have open."""
THREADS = 32
"""Threads of a program whose user is its own, besides its processes."""
BLOCK = 4096
"""Bytes that a file takes at least, the empty one too: its place in a directory."""
PART = 1 << 16
OPEN_DEVICES = {"/dev/null": kernel.READ_FILE | kernel.WRITE_FILE, "/dev/zero": kernel.READ_FILE,
                "/dev/random": kernel.READ_FILE, "/dev/urandom": kernel.READ_FILE}
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/etc/localtime",
             "/usr/share/zoneinfo")
PROGRAMS = ("/bin", "/usr/bin")
"""Readable where a program may start others."""
PYTHON = os.path.realpath(sys.executable)
PACKAGES = list(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))
BOOTSTRAP = Path(__file__).with_name("sandbox_program.py")
TRIES = """
import json, os, socket
def fails(function, *arguments):
    try: function(*arguments)
    except OSError: return True
    return False
def forks():
    pid = os.fork()
    if pid == 0: os._exit(0)
    os.waitpid(pid, 0)
print(json.dumps({"landlock": fails(open, CANARY), "seccomp": fails(socket.socket), "uid": os.getuid(),
                  "alone": fails(forks), "writes": not fails(open, "mine", "w")}))
"""
"""A program that tries the rungs; CANARY is a file that everybody may read."""


class Broken(Exception):
    """The sandbox cannot hold a program, or lost hold of one."""


def main(descriptor: int) -> None:
    """Serve the socket of that number until it closes."""
    print_by_lines()
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)  # an orphan of a program becomes a child of this process
    with socket.socket(fileno=descriptor) as channel:
        setup = receive(channel)
        if setup is None:
            return
        try:
            worker = Worker(**setup)
        except BaseException as error:
            send(channel, {"broken": str(error) if isinstance(error, Broken) else describe(error)})
            return
        send(channel, {"rungs": worker.rungs})
        try:
            while (request := receive(channel)) is not None:
                send(channel, worker.answer(request))
        finally:
            worker.close()


class Worker:
    """Runs programs with these limits."""

    def __init__(self, memory_mib: int, disk_mib: int, output_kib: int, max_processes: int,
                 allow_missing: list[str]) -> None:
        """
        Raises:
            Broken: a rung is missing that is needed and not in `allow_missing`, or does not hold.
        """
        self._memory, self._disk, self._output = memory_mib << 20, disk_mib << 20, output_kib << 10
        self._processes = max_processes
        self._pid = os.getpid()
        self._session: Program | None = None
        self._bootstrap = BOOTSTRAP.read_text(encoding="utf-8")
        self._base = Base()
        self._missing = self._look()
        self._user = User() if not self._missing["uid"] else None
        self._kept = [kernel.CAP_DAC_READ_SEARCH] if self._user and self._closed_to_others() else []
        self._cgroup = ControlGroup(memory_mib << 20, THREADS + max_processes)
        try:
            self._require(allow_missing)
            self._try()
        except BaseException:
            self.close()
            raise
        self.rungs = {name: self._missing.get(name, "") for name in ("landlock", "seccomp", "uid", "cgroup")}
        """Why each is missing; "" for one that holds."""
        if lost := [f"{name} ({why})" for name, why in self.rungs.items() if why and name in allow_missing]:
            print(f"programs are held back less than usual, as allowed: without {', '.join(lost)}")

    def _look(self) -> dict[str, str]:
        abi = kernel.landlock_abi()
        return {
            "landlock": "" if abi >= kernel.LEAST_ABI else
            f"its ABI is {abi}, and must be at least {kernel.LEAST_ABI} (Linux 6.2)" if abi else
            "the kernel has none, or it is not in its list of modules (lsm=landlock)",
            "seccomp": kernel.seccomp_problem(),
            "uid": "" if os.geteuid() == 0 else "only root can give a program another user",
        }

    def _closed_to_others(self) -> bool:
        """Whether another user cannot reach Python, because it is in somebody's private directory."""
        needed = [PYTHON, os.__file__, *PACKAGES, str(self._base.path)]
        return any(not each.stat().st_mode & stat.S_IXOTH for path in needed for each in Path(path).parents)

    def _require(self, allow_missing: list[str]) -> None:
        """
        Raises:
            Broken: a rung is missing that is needed.
        """
        needed = {"landlock": "files", "seccomp": "the network and other processes"}
        if os.geteuid() == 0:
            needed["uid"] = "what belongs to root"
        elif self._processes > 1:
            needed["uid"] = f"the processes that a program starts (max_processes={self._processes})"
        lacking = [name for name in needed if self._missing[name] and name not in allow_missing]
        if lacking:
            raise Broken("; ".join(f"{name}, which holds programs back from {needed[name]}, is missing: "
                                   f"{self._missing[name]}" for name in lacking)
                         + f". Run where it is there, or allow it in writing: sandbox.allow_missing: {lacking}")
        if self._kept and self._missing["landlock"]:
            raise Broken(f"{PYTHON} or its packages are in a directory that other users cannot enter, and without "
                         "landlock nothing else holds back a program that may enter it; install Python elsewhere")
        if self._processes > 1 and self._missing["uid"]:
            raise Broken(f"max_processes={self._processes}: without another user, the processes that a program starts "
                         "are neither counted nor found again; set it to 1")

    def _try(self) -> None:
        """Run a program that tries the rungs.

        Raises:
            Broken: it can do what it must not do, or cannot run.
        """
        canary = Path(self._base.path, "canary")
        canary.write_text("")
        canary.chmod(0o644)
        code = f"CANARY = {str(canary)!r}\n{TRIES}"
        told = self.answer({"kind": "script", "name": "__main__", "setup": "", "code": code, "timeout_s": TEST_S})
        canary.unlink()
        if "broken" in told:
            raise Broken(told["broken"])
        if told["status"] != 0:
            raise Broken(f"a program that tries the sandbox ended with {told['status']} {told['killed']}: "
                         f"{told['errors'][-500:].strip()}")
        found = json.loads(told["output"])
        wanted = {"writes": True, "uid": self._user.number if self._user else os.getuid()}
        wanted |= {name: True for name in ("landlock", "seccomp") if not self._missing[name]}
        if not self._missing["seccomp"]:
            wanted["alone"] = self._processes == 1
        if wrong := {name: found[name] for name, value in wanted.items() if found[name] != value}:
            raise Broken(f"a program that tries the sandbox found {wrong} in place of {wanted}")
        self._missing["cgroup"] = self._cgroup.missing

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a program to its end, or the next part of a session; {"broken": ...} if it could not be run."""
        try:
            if request["kind"] == "session":
                return self._turn(request)
            program = Program(self, request, request["timeout_s"])
            try:
                program.attend(time.monotonic() + request["timeout_s"])
            finally:
                program.end()
            return program.outcome()
        except BaseException as error:
            return {"broken": str(error) if isinstance(error, Broken) else describe(error)}

    def _turn(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._session is None:
            self._session = Program(self, request, None)
        session = self._session
        session.say({"code": request["code"]})
        session.attend(time.monotonic() + request["timeout_s"])
        if session.ended:
            self._session = None
            session.end()
        return session.outcome()

    def close(self) -> None:
        """Kill what runs, and remove all files."""
        if self._session is not None:
            self._session.end()
        self._cgroup.remove()
        self._base.remove()

    # what a program does before it is one

    def enter(self, directory: str, cpu_s: int | None) -> None:
        """Give up everything that a program must not have, in the process that becomes it."""
        os.chdir(directory)
        os.umask(0o077)
        self._cgroup.enter()
        for name, value in self._limits(cpu_s).items():
            _lower(name, value)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        if not self._missing["landlock"]:
            kernel.landlock(self._rights(directory))
        if self._user is not None:
            self._user.become(keeps=bool(self._kept))
        if os.getuid() == 0 or self._user is not None:
            kernel.set_capabilities(self._kept)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._pid:  # it has ended before
            os._exit(1)
        if not self._missing["seccomp"]:
            kernel.seccomp(other_user=self._user is not None, may_start=self._processes > 1)

    def _limits(self, cpu_s: int | None) -> dict[int, int]:
        limits = {resource.RLIMIT_AS: self._memory, resource.RLIMIT_FSIZE: self._disk, resource.RLIMIT_NOFILE: FILES,
                  resource.RLIMIT_CORE: 0, resource.RLIMIT_MEMLOCK: 0, resource.RLIMIT_MSGQUEUE: 0,
                  resource.RLIMIT_SIGPENDING: 1024}
        if cpu_s is not None:
            limits[resource.RLIMIT_CPU] = cpu_s
        if self._user is not None:
            limits[resource.RLIMIT_NPROC] = self._processes if self._processes > 1 else THREADS
        return limits

    def _rights(self, directory: str) -> dict[str, int]:
        readable = [sys.base_prefix, PYTHON, *PACKAGES, *LIBRARIES, *(PROGRAMS if self._processes > 1 else ())]
        return {**dict.fromkeys(readable, kernel.READABLE), **OPEN_DEVICES, directory: kernel.WRITABLE}

    def variables(self, directory: str) -> dict[str, str]:
        """All that the environment of a program has."""
        return {"PATH": ":".join(PROGRAMS), "HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8",
                "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

    def command(self) -> list[str]:
        """The interpreter: without the directory of the program, user's packages, site and bytecode files."""
        return [PYTHON, "-s", "-P", "-S", "-B", "-c", self._bootstrap]

    def new_directory(self) -> str:
        """An empty directory that belongs to the program."""
        return self._base.directory(self._user.number if self._user else None)

    def kill(self, pid: int) -> int:
        """Kill a program and all that it has started; returns its status, as of `os.wait`.

        Raises:
            Broken: something is left.
        """
        ended: dict[int, int] = {}
        deadline = time.monotonic() + GONE_S
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        several = self._processes > 1 or bool(self._missing["seccomp"])
        while reap(ended):
            if several and self._user is not None:
                self._user.kill_all()
            for each in children() if several else ():
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise Broken(f"process {pid} of a program, or one that it has started, cannot be killed")
            time.sleep(0.001)
        return ended.get(pid, signal.SIGKILL)

    def spoilt(self, directory: str, pid: int) -> bool:
        """Whether a program has more files than it may have, those without a name included."""
        pids = [pid] if self._user is None or self._processes == 1 else self._user.processes()
        return size_of(directory, self._disk) + sum(map(_nameless, pids)) > self._disk

    @property
    def output(self) -> int:
        """Bytes that a program may print."""
        return self._output


class Program:
    """One program, from its start until all of it is killed."""

    def __init__(self, worker: Worker, job: dict[str, Any], timeout_s: float | None) -> None:
        """
        Args:
            timeout_s: of its whole life; None for a session.

        Raises:
            Broken: it cannot be started.
        """
        self._worker, self._token, self._wanted = worker, secrets.token_hex(16), job.get("wanted")
        self.ended, self._seconds = False, 0.0
        self._status: int | None = None
        self._killed = ""
        self._printed = {"output": bytearray(), "errors": bytearray()}
        self._told = bytearray()
        self._verdict: str | None = None
        self._session = job["kind"] == "session"
        self._directory = worker.new_directory()
        stdin = _file(job.get("stdin", ""))
        pipes = {name: os.pipe() for name in ("output", "errors", "told")}
        self._read = {name: ends[0] for name, ends in pipes.items()}
        theirs, self._jobs = os.pipe()
        problem, ours = os.pipe()
        cpu_s = None if timeout_s is None else int(timeout_s) + 2
        self._pid = os.fork()
        if self._pid == 0:
            _become(worker, self._directory, cpu_s,
                    [stdin, pipes["output"][1], pipes["errors"][1], theirs, pipes["told"][1]], ours)
        for each in (stdin, theirs, ours, *(ends[1] for ends in pipes.values())):
            os.close(each)
        with os.fdopen(problem, "rb") as file:
            what = file.read().decode(errors="replace")
        self._unsent = b""
        if what:
            self.end()
            raise Broken(f"no program can be started: {what}")
        self._life = os.pidfd_open(self._pid)
        for each in (self._jobs, *self._read.values()):
            os.set_blocking(each, False)
        self.say({**{key: job[key] for key in ("kind", "name", "setup")}, "paths": PACKAGES,
                  "code": "" if self._session else job["code"]})

    def say(self, message: dict[str, Any]) -> None:
        """Send it a line, and begin to count what it prints."""
        self._unsent += json.dumps(message).encode() + b"\n"
        if self._session:
            self._printed = {"output": bytearray(), "errors": bytearray()}
            self._killed, self._verdict = "", None

    def attend(self, deadline: float) -> None:
        """Run until it has ended, or said all that is wanted of it, or has to be killed."""
        began = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for name, each in (*self._read.items(), ("life", self._life)):
                selector.register(each, selectors.EVENT_READ, name)
            if self._unsent:
                selector.register(self._jobs, selectors.EVENT_WRITE, "jobs")
            look = time.monotonic() + LOOK_S
            while not self._killed and self._verdict is None:
                now = time.monotonic()
                if now >= deadline:
                    self._killed = "time"
                    break
                if now >= look:
                    look = now + LOOK_S
                    if self._worker.spoilt(self._directory, self._pid):
                        self._killed = "disk"
                        break
                ready = {key.data for key, _ in selector.select(max(0.0, min(deadline, look) - now))}
                if "jobs" in ready and not self._send():
                    selector.unregister(self._jobs)
                for name in ready & self._read.keys():
                    if not self._take(name):
                        selector.unregister(self._read[name])
                if self._unsent and self._jobs not in selector.get_map():
                    selector.register(self._jobs, selectors.EVENT_WRITE, "jobs")
                if "life" in ready:
                    self.ended = True
                    break
        self.ended = self.ended or bool(self._killed)
        self._seconds = time.monotonic() - began
        for name in self._read:  # what it has printed before it said so, or ended
            self._take(name)

    def _send(self) -> bool:
        """Send what fits; False when nothing is left."""
        try:
            self._unsent = self._unsent[os.write(self._jobs, self._unsent[:PART]):]
        except BlockingIOError:
            return True
        except BrokenPipeError:  # it has closed its end
            self._unsent = b""
        return bool(self._unsent)

    def _take(self, name: str) -> bool:
        """Read what is there, up to the limit; False at the end."""
        taken = self._told if name == "told" else self._printed[name]
        while True:
            try:
                part = os.read(self._read[name], PART)
            except BlockingIOError:
                return True
            taken += part
            if len(taken) > self._worker.output:
                del taken[self._worker.output:]
                self._killed = self._killed or "output"
                return False
            if name == "told" and part:
                self._hear()
            if not part:
                return False

    def _hear(self) -> None:
        """What it told in whole lines."""
        while b"\n" in self._told:
            line, _, rest = self._told.partition(b"\n")
            self._told[:] = rest
            text = line.decode(errors="replace")
            if self._session and text == "done":
                self._verdict = ""
            elif self._wanted is not None and text == "loaded":
                self._unsent += json.dumps({**self._wanted, "token": self._token}).encode() + b"\n"
                self._wanted = None
            elif text[:len(self._token)] == self._token:
                self._verdict = text[len(self._token):].strip()

    def end(self) -> None:
        """Kill all of it, and remove its files. May be called twice."""
        if self._status is not None:
            return
        self.ended = True
        try:
            self._status = self._worker.kill(self._pid)
        finally:
            for each in (self._jobs, *self._read.values(), getattr(self, "_life", None)):
                if each is not None:
                    os.close(each)
            remove(self._directory)

    def outcome(self) -> dict[str, Any]:
        """What came of it, as of `sandbox.Outcome`."""
        status = None if self._status is None else os.waitstatus_to_exitcode(self._status)
        return {"status": status if self.ended else None, "killed": self._killed, "verdict": self._verdict,
                "seconds": self._seconds,
                **{name: text.decode(errors="replace") for name, text in self._printed.items()}}


def _become(worker: Worker, directory: str, cpu_s: int | None, descriptors: list[int], problem: int) -> None:
    """In a new process: become a program, with `descriptors` as its files 0, 1, ... It does not return."""
    try:
        os.setsid()
        high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 2 * FILES) for each in (*descriptors, problem)]
        *files, problem = high
        for number, each in enumerate(files):
            os.dup2(each, number)
        os.dup2(problem, len(files), inheritable=False)
        problem = len(files)
        os.closerange(problem + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        worker.enter(directory, cpu_s)
        os.execve(PYTHON, worker.command(), worker.variables(directory))
    except BaseException as error:
        with suppress(OSError):
            os.write(problem, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(1)


def _lower(name: int, value: int) -> None:
    hard = resource.getrlimit(name)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(name, (value, value))


def _file(text: str) -> int:
    """A descriptor from which the text can be read, of a file without a name; nothing if it is empty."""
    if not text:
        return os.open(os.devnull, os.O_RDONLY)
    with tempfile.TemporaryFile() as file:
        file.write(text.encode(errors="surrogatepass"))
        file.flush()
        return os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY)


class User:
    """A user that nobody else has, as long as this process lives."""

    def __init__(self) -> None:
        """
        Raises:
            Broken: all are taken.
        """
        known = {each.pw_uid for each in pwd.getpwall()} | _running_users()
        candidates = [each for each in UIDS if each not in known]
        random.SystemRandom().shuffle(candidates)
        for number in candidates:
            self._claim = socket.socket(socket.AF_UNIX)
            with suppress(OSError):
                self._claim.bind(f"\0{PREFIX}{number}")  # the kernel gives a name to one process only
                self.number = number
                return
            self._claim.close()
        raise Broken(f"no free user is left of {UIDS.start} to {UIDS.stop - 1}")

    def become(self, *, keeps: bool) -> None:
        """Be this user, in this process.

        Args:
            keeps: capabilities until they are set anew.
        """
        if keeps:
            kernel.prctl(kernel.PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(self.number, self.number, self.number)
        os.setresuid(self.number, self.number, self.number)

    def kill_all(self) -> None:
        """Kill all processes of this user: those that are being started, too."""
        pid = os.fork()
        if pid == 0:
            with suppress(OSError):
                os.setresuid(self.number, self.number, self.number)
                os.kill(-1, signal.SIGKILL)
            os._exit(0)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)

    def processes(self) -> list[int]:
        """Their ids."""
        found = []
        for each in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if each.stat().st_uid == self.number:
                    found.append(int(each.name))
        return found


def _running_users() -> set[int]:
    found = set()
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found.add(each.stat().st_uid)
    return found


class ControlGroup:
    """A cgroup for the programs of this worker, of version 1 or 2, where one can be made."""

    def __init__(self, memory: int, processes: int) -> None:
        self._made: list[Path] = []
        self.missing = ""
        name = f"{PREFIX}{os.getpid()}"
        try:
            for parent, limits in self._parents(memory, processes):
                group = parent / name
                group.mkdir()
                self._made.append(group)
                for file, value in limits.items():
                    (group / file).write_text(str(value))
        except (OSError, ValueError) as error:
            self.remove()
            self.missing = f"none can be made: {error}"

    @staticmethod
    def _parents(memory: int, processes: int) -> list[tuple[Path, dict[str, int]]]:
        """(cgroup of this process, limits for one below it) of each hierarchy that is needed."""
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        paths = {name: path for _, names, path in lines for name in names.split(",")}
        root = Path("/sys/fs/cgroup")
        if "pids" in paths:
            return [(root / "pids" / paths["pids"].lstrip("/"), {"pids.max": processes}),
                    (root / "memory" / paths["memory"].lstrip("/"), {"memory.limit_in_bytes": memory})]
        return [(root / paths[""].lstrip("/"), {"pids.max": processes, "memory.max": memory})]

    def enter(self) -> None:
        """Put this process into it."""
        for group in self._made:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        """Remove it, when nothing runs in it any more."""
        for group in self._made:
            deadline = time.monotonic() + 1.0
            while group.exists() and time.monotonic() < deadline:
                with suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.01)
        self._made = []


class Base:
    """The directory of this worker, in which each program has its own. It is locked, so that another worker removes what
    one left that was killed."""

    def __init__(self) -> None:
        for other in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with suppress(OSError):
                facts = other.lstat()
                old = stat.S_ISDIR(facts.st_mode) and time.time() - facts.st_ctime > OLD_S
                if old and facts.st_uid == os.getuid() and (lock := _lock(str(other))) is not None:
                    remove(str(other))
                    os.close(lock)
        self.path = tempfile.mkdtemp(prefix=PREFIX)
        os.chmod(self.path, 0o711)
        self._lock = _lock(self.path)

    def directory(self, user: int | None) -> str:
        """A new empty directory that belongs to this user."""
        path = f"{self.path}/{secrets.token_hex(4)}"
        os.mkdir(path, 0o700)
        if user is not None:
            os.chown(path, user, user)
        return path

    def remove(self) -> None:
        """Remove it with all that is in it."""
        remove(self.path)


def _lock(directory: str) -> int | None:
    """A descriptor of a directory that is locked while it is open; None if another process has the lock."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    except OSError:
        os.close(descriptor)
        return None


def size_of(directory: str, enough: int) -> int:
    """Bytes of the files below a directory, each at least a block; a directory that cannot be read, such as one below
    too many others, counts as too large. It stops when it has found more than `enough`."""
    found, places = 0, [directory]
    while places and found <= enough:
        try:
            with os.scandir(places.pop()) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        facts = entry.stat(follow_symlinks=False)
                        found += max(BLOCK, facts.st_blocks * 512)
                        if stat.S_ISDIR(facts.st_mode):
                            places.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return enough + 1
    return found


def _nameless(pid: int) -> int:
    """Bytes of the files that a process has open and that have no name any more."""
    found = {}
    with suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                facts = os.stat(f"/proc/{pid}/fd/{number}")
                if stat.S_ISREG(facts.st_mode) and facts.st_nlink == 0:
                    found[facts.st_ino] = facts.st_blocks * 512
    return sum(found.values())


def remove(directory: str) -> None:
    """Remove a directory whose processes have ended, however deep: the directories in it are moved to its top first."""
    os.chmod(directory, 0o700)
    moved, more = 0, True
    while more:
        more = False
        for name in os.listdir(directory):
            path = f"{directory}/{name}"
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                os.unlink(path)
                continue
            os.chmod(path, 0o700)
            for inner in os.listdir(path):
                below = f"{path}/{inner}"
                if stat.S_ISDIR(os.lstat(below).st_mode):
                    os.chmod(below, 0o700)  # a directory is moved by who may write to it
                    moved += 1
                    os.rename(below, f"{directory}/.moved-{secrets.token_hex(4)}-{moved}")
                    more = True
                else:
                    os.unlink(below)
            os.rmdir(path)
    shutil.rmtree(directory, ignore_errors=True)
