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
import resource
import secrets
import selectors
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
from rlhf_ray.user_code.sandbox_files import Base, nameless, remove, size_of
from rlhf_ray.user_code.sandbox_identity import Broken, ControlGroup, User

LOOK_S = 0.05
"""Pause between two looks at the size of a program's files."""
GONE_S = 5.0
"""Longest wait for killed processes to disappear."""
TEST_S = 30.0
"""Time for the program that tries the rungs, on a machine that is busy."""
FILES = 64
"""Files that a process may have open."""
THREADS = 32
"""Threads of a program whose user is its own, besides its processes."""
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
            sys.stdout.write(f"programs are held back less than usual, as allowed: without {', '.join(lost)}\n")

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
        session.go_on()
        session.attend(time.monotonic() + request["timeout_s"])
        session.pause()
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
        return size_of(directory, self._disk) + sum(map(nameless, pids)) > self._disk

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to all processes of a program."""
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        if self._processes > 1 and self._user is not None:
            self._user.signal_all(number)

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

    def pause(self) -> None:
        """Stop it between two turns, in which nobody attends to its time and its files; kill it if it has too many."""
        if not self.ended:
            self._worker.signal(self._pid, signal.SIGSTOP)
            if self._worker.spoilt(self._directory, self._pid):
                self.ended, self._killed = True, "disk"

    def go_on(self) -> None:
        """After `pause`."""
        self._worker.signal(self._pid, signal.SIGCONT)

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
        os.execve(PYTHON, worker.command(), worker.variables(directory))  # noqa: S606
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
