"""What the Linux kernel offers to hold a program back, by ctypes: Landlock, seccomp, capabilities and prctl.

Each function acts on the calling process, and on what it becomes and starts; none can be taken back. Imports the
standard library alone.

Sources: Linux's `include/uapi/linux/{landlock,seccomp,filter,capability,prctl}.h`, and `Documentation/userspace-api/
landlock.rst` for what each ABI adds.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress

LIBC = ctypes.CDLL(None, use_errno=True)

# prctl
PR_SET_PDEATHSIG = 1
PR_SET_KEEPCAPS = 8
PR_SET_NAME, PR_GET_NAME = 15, 16
PR_GET_DUMPABLE = 3
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, PR_CAP_AMBIENT_CLEAR_ALL = 47, 2, 4

CAP_DAC_READ_SEARCH = 2
"""Reads files and passes directories whatever their permissions."""


def call(number: int, *arguments: int | bytes | None) -> int:
    """A system call.

    Raises:
        OSError: it failed.
    """
    given = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result: int = LIBC.syscall(ctypes.c_long(number), *given)
    if result < 0:
        failed = ctypes.get_errno()
        raise OSError(failed, os.strerror(failed))
    return result


def prctl(option: int, *arguments: int) -> None:
    """`prctl`. Raises OSError."""
    given = [ctypes.c_ulong(each) for each in (*arguments, 0, 0, 0, 0)[:4]]
    if LIBC.prctl(option, *given) < 0:
        failed = ctypes.get_errno()
        raise OSError(failed, os.strerror(failed))


def set_capabilities(kept: Iterable[int]) -> None:
    """Have these capabilities alone, and keep them when another program is executed. Raises OSError."""
    bits = sum(1 << each for each in kept)
    header = struct.pack("<II", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    halves = [struct.pack("<III", part, part, part) for part in (bits & 0xFFFFFFFF, bits >> 32)]
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    if LIBC.capset(header, b"".join(halves)) < 0:
        failed = ctypes.get_errno()
        raise OSError(failed, os.strerror(failed))
    for each in kept:
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, each)


# Landlock

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # on all architectures
LANDLOCK_CREATE_RULESET_VERSION = 1
LANDLOCK_RULE_PATH_BENEATH = 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE = (1 << bit for bit in range(6))
MAKE_CHAR, MAKE_DIR, MAKE_REG, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK, MAKE_SYM = (1 << bit for bit in range(6, 13))
REFER, TRUNCATE, IOCTL_DEV = (1 << bit for bit in range(13, 16))
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
"""Rights that a file may have; the others are of directories."""
READABLE = EXECUTE | READ_FILE | READ_DIR
WRITABLE = (READ_FILE | WRITE_FILE | READ_DIR | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_FIFO | MAKE_SYM
            | REFER | TRUNCATE)
LEAST_ABI = 3
"""Before it (Linux 6.2), any file may be truncated."""
NET_ABI, IOCTL_ABI, SCOPE_ABI = 4, 5, 6


def landlock_abi() -> int:
    """The version of Landlock; 0 where there is none."""
    with suppress(OSError):
        return call(CREATE_RULESET, None, 0, LANDLOCK_CREATE_RULESET_VERSION)
    return 0


def landlock(rights: Mapping[str, int]) -> None:
    """Allow these paths and what is below them alone, in these ways. With ABI 4 there is also no TCP, and with ABI 6 no
    signal to, and no abstract socket of, a process that is not restricted with this one.

    Args:
        rights: path -> rights. A path that does not exist is left out.

    Raises:
        OSError: the kernel refuses.
    """
    abi = landlock_abi()
    files = (1 << (16 if abi >= IOCTL_ABI else 15)) - 1
    attributes = [files, *([3] if abi >= NET_ABI else []), *([3] if abi >= SCOPE_ABI else [])]
    packed = struct.pack(f"<{len(attributes)}Q", *attributes)
    ruleset = call(CREATE_RULESET, packed, len(packed), 0)
    try:
        for path, allowed in rights.items():
            with suppress(FileNotFoundError):
                place = os.open(path, os.O_PATH | os.O_CLOEXEC)
                if not os.path.isdir(path):
                    allowed &= OF_FILES
                rule = struct.pack("<Qi", allowed & files, place)
                call(ADD_RULE, ruleset, LANDLOCK_RULE_PATH_BENEATH, rule, 0)
                os.close(place)
        call(RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


# seccomp

AUDIT_ARCH_X86_64 = 0xC000003E
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
"""BPF: load a word of `seccomp_data`; jump if equal, if at least, if any bit is set; return."""
NUMBER, ARCHITECTURE = 0, 4
"""Offsets in `seccomp_data`."""
NEWER = 335
"""From this number on, libraries try calls and do without them if they do not exist."""
CLONE_THREAD = 0x10000
CLONE_FOREIGN = 0x2000 | 0x8000 | 0x20000 | 0x7E000000
"""CLONE_PTRACE, CLONE_PARENT, and all new namespaces."""

_ALLOWED = {
    # files, by descriptor and by path (Landlock decides which)
    "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "lseek": 8, "pread64": 17,
    "pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "pipe": 22, "dup": 32, "dup2": 33, "sendfile": 40,
    "flock": 73, "fsync": 74, "fdatasync": 75, "truncate": 76, "ftruncate": 77, "getdents": 78, "getcwd": 79,
    "chdir": 80, "fchdir": 81, "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85, "link": 86, "unlink": 87,
    "symlink": 88, "readlink": 89, "umask": 95, "statfs": 137, "fstatfs": 138, "readahead": 187, "getxattr": 191,
    "lgetxattr": 192, "fgetxattr": 193, "listxattr": 194, "llistxattr": 195, "flistxattr": 196, "getdents64": 217,
    "fadvise64": 221, "openat": 257, "mkdirat": 258, "newfstatat": 262, "unlinkat": 263, "renameat": 264, "linkat": 265,
    "symlinkat": 266, "readlinkat": 267, "faccessat": 269, "fallocate": 285, "dup3": 292, "pipe2": 293, "preadv": 295,
    "pwritev": 296, "renameat2": 316, "copy_file_range": 326, "preadv2": 327, "pwritev2": 328, "statx": 332,
    "close_range": 436, "faccessat2": 439,
    # waiting
    "poll": 7, "select": 23, "sched_yield": 24, "pause": 34, "nanosleep": 35, "getitimer": 36, "alarm": 37,
    "setitimer": 38, "epoll_create": 213, "restart_syscall": 219, "timer_create": 222, "timer_settime": 223,
    "timer_gettime": 224, "timer_getoverrun": 225, "timer_delete": 226, "clock_nanosleep": 230, "epoll_wait": 232,
    "epoll_ctl": 233, "pselect6": 270, "ppoll": 271, "epoll_pwait": 281, "timerfd_create": 283, "eventfd": 284,
    "timerfd_settime": 286, "timerfd_gettime": 287, "eventfd2": 290, "epoll_create1": 291, "epoll_pwait2": 441,
    # memory
    "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "mremap": 25, "msync": 26, "mincore": 27, "madvise": 28,
    # this process
    "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "getpid": 39, "execve": 59, "exit": 60, "wait4": 61,
    "uname": 63, "gettimeofday": 96, "getrlimit": 97, "getrusage": 98, "sysinfo": 99, "times": 100, "getuid": 102,
    "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "getpgrp": 111, "setsid": 112, "getgroups": 115,
    "getresuid": 118, "getresgid": 120, "getpgid": 121, "getsid": 124, "rt_sigpending": 127, "rt_sigtimedwait": 128,
    "rt_sigsuspend": 130, "sigaltstack": 131, "getpriority": 140, "sched_getparam": 143, "sched_getscheduler": 145,
    "sched_get_priority_max": 146, "sched_get_priority_min": 147, "arch_prctl": 158, "setrlimit": 160, "gettid": 186,
    "time": 201, "futex": 202, "sched_getaffinity": 204, "set_tid_address": 218, "clock_gettime": 228,
    "clock_getres": 229, "exit_group": 231, "waitid": 247, "set_robust_list": 273, "getcpu": 309, "getrandom": 318,
    "membarrier": 324, "rseq": 334,
    # a pair of connected sockets, which asyncio wakes itself up by
    "recvfrom": 45, "sendmsg": 46, "recvmsg": 47, "shutdown": 48, "getsockname": 51, "getpeername": 52,
    "setsockopt": 54, "getsockopt": 55,
}
_OWN_FILES = {"chmod": 90, "fchmod": 91, "utime": 132, "utimes": 235, "futimesat": 261, "fchmodat": 268,
              "utimensat": 280, "fchmodat2": 452}
"""Landlock does not hold these back: they are allowed to another user, who may do so to its own files alone."""
_STARTING = {"fork": 57, "vfork": 58, "setpgid": 109}
_IOCTL, _SENDTO, _SOCKETPAIR, _CLONE, _KILL, _FCNTL, _PRCTL = 16, 44, 53, 56, 62, 72, 157
_SCHED_SETAFFINITY, _TGKILL, _PRLIMIT64, _CLONE3 = 203, 234, 302, 435
_FOREIGN_IOCTLS = (0x8901, 0x8902, 0x5412, 0x541C, 0x540E)
"""FIOSETOWN, SIOCSPGRP, TIOCSTI, TIOCLINUX, TIOCSCTTY: signals to others, and typing for others."""
_FOREIGN_FCNTLS = (8, 10, 15, 1024, 1026)
"""F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY."""
_OWN_PRCTLS = (PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME)
_STREAM_FLAGS = (0, socket.SOCK_CLOEXEC, socket.SOCK_NONBLOCK, socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)

Instruction = tuple[int, int, int, int]
"""(code, instructions to skip if true, if false, operand)."""


def _argument(number: int) -> Instruction:
    """Load the low word of an argument: all that are compared here are ints to the kernel."""
    return LOAD, 0, 0, 16 + 8 * number


def _answer(value: int) -> Instruction:
    return RETURN, 0, 0, value


def _one_of(values: Iterable[int], then: int, otherwise: int) -> list[Instruction]:
    """Return `then` if the loaded word is one of the values."""
    found: list[Instruction] = []
    for value in values:
        found += [(EQUAL, 0, 1, value), _answer(then)]
    return [*found, _answer(otherwise)]


DENY = ERRNO | errno.EPERM
ABSENT = ERRNO | errno.ENOSYS


def _conditional(*, own_pid: int | None, may_start: bool) -> dict[int, list[Instruction]]:
    """What is decided by arguments: number of the call -> instructions that end with an answer."""
    pair = (EQUAL, 1, 0, socket.AF_UNIX)
    kinds = [socket.SOCK_STREAM | flags for flags in _STREAM_FLAGS]
    own = [_argument(0), *_one_of([own_pid], ALLOW, DENY)] if own_pid is not None else [_answer(ALLOW)]
    clone = ([_argument(0), (ANY_BIT, 0, 1, CLONE_FOREIGN), _answer(DENY), _answer(ALLOW)] if may_start else
             [_argument(0), (ANY_BIT, 0, 1, CLONE_FOREIGN), _answer(DENY), (ANY_BIT, 0, 1, CLONE_THREAD),
              _answer(ALLOW), _answer(DENY)])
    null = [(LOAD, 0, 0, 16 + 8 * 4), (EQUAL, 1, 0, 0), _answer(DENY),
            (LOAD, 0, 0, 20 + 8 * 4), *_one_of([0], ALLOW, DENY)]  # a pointer has two words
    return {
        _IOCTL: [_argument(1), *_one_of(_FOREIGN_IOCTLS, DENY, ALLOW)],
        _FCNTL: [_argument(1), *_one_of(_FOREIGN_FCNTLS, DENY, ALLOW)],
        _PRCTL: [_argument(0), *_one_of(_OWN_PRCTLS, ALLOW, DENY)],
        _SENDTO: null,
        _SOCKETPAIR: [_argument(0), pair, _answer(DENY), _argument(1), *_one_of(kinds, ALLOW, DENY)],
        _CLONE: clone,
        _CLONE3: [_answer(ABSENT)],  # its flags are in memory; libc then uses clone
        _KILL: own, _TGKILL: own,
        _SCHED_SETAFFINITY: [_argument(0), *_one_of([0], ALLOW, DENY)],
        _PRLIMIT64: [_argument(0), *_one_of([0], ALLOW, DENY)],
    }


def seccomp_problem() -> str:
    """Why there can be no filter; "" if there can be one."""
    machine = platform.machine()
    if machine != "x86_64" or struct.calcsize("P") != 8:
        return f"its list of system calls is for x86_64, and this is {machine}"
    if LIBC.prctl(21, 0, 0, 0, 0) < 0:  # PR_GET_SECCOMP
        return "the kernel has no seccomp"
    return ""


def seccomp(*, other_user: bool, may_start: bool) -> None:
    """Allow the listed system calls alone: no sockets, no namespaces, no tracing, no io_uring, no keys, no BPF.

    Needs `PR_SET_NO_NEW_PRIVS`.

    Args:
        other_user: the process has a user of its own, so that it may change its files' permissions.
        may_start: it may start processes, and send signals; otherwise to itself alone.

    Raises:
        OSError: the kernel refuses.
    """
    allowed = {**_ALLOWED, **(_OWN_FILES if other_user else {}), **(_STARTING if may_start else {})}
    program: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, AUDIT_ARCH_X86_64), _answer(KILL),
        (LOAD, 0, 0, NUMBER)]
    conditional = _conditional(own_pid=None if may_start else os.getpid(), may_start=may_start)
    for number in allowed.values():
        program += [(EQUAL, 0, 1, number), _answer(ALLOW)]
    for number, decision in conditional.items():
        program += [(EQUAL, 0, len(decision), number), *decision]
    program += [(AT_LEAST, 0, 1, NEWER), _answer(ABSENT), _answer(DENY)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *each) for each in program))
    described = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(described))
