"""`python -m chaos.packet_loss LINK SHARE` drops a share of the packets of a network link at random, both those that
arrive and those that leave.

The kernel's own tool for this, netem, is a module that many kernels do not have. A filter program (eBPF) of `tc` needs
none: it draws a number for each packet. Run it in a mount namespace of its own (`unshare --mount`), because `tc` takes
the program from a file system of the kernel's, which is mounted for it and has to go afterwards.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

SYSCALLS = {"x86_64": 321, "aarch64": 280}
"""bpf(2), by the processor."""
LOAD, PIN = 5, 6
"""Its commands: load a program, and give it a name in a file system."""
CLASSIFIER = 3
"""The type of programs that `tc` takes (BPF_PROG_TYPE_SCHED_CLS)."""
LOG_BYTES = 65536


def program(share: float) -> bytes:
    """The filter: its answer for a packet is "drop" with this probability, otherwise that other filters decide."""
    instructions = [
        (0x85, 0, 0, 7),  # r0 = a random number of 32 bits
        (0xB4, 1, 0, round(share * (2**32 - 1))),  # r1 = the largest number that drops the packet
        (0x2D, 0x10, 2, 0),  # if r0 > r1, skip two instructions
        (0xB7, 0, 0, 2), (0x95, 0, 0, 0),  # return TC_ACT_SHOT
        (0xB7, 0, 0, 2**32 - 1), (0x95, 0, 0, 0)]  # return TC_ACT_UNSPEC, -1
    return b"".join(struct.pack("<BBhI", *each) for each in instructions)


def pin(code: bytes, path: Path) -> None:
    """Load a program, and name it in a file system of the kernel's.

    Raises:
        OSError: the kernel refuses it.
    """
    instructions, licence = ctypes.create_string_buffer(code), ctypes.create_string_buffer(b"GPL")
    log, name = ctypes.create_string_buffer(LOG_BYTES), ctypes.create_string_buffer(os.fsencode(path))
    loaded = _bpf(LOAD, struct.pack("<IIQQIIQII", CLASSIFIER, len(code) // 8, ctypes.addressof(instructions),
                                    ctypes.addressof(licence), 1, LOG_BYTES, ctypes.addressof(log), 0, 0))
    _bpf(PIN, struct.pack("<QII", ctypes.addressof(name), loaded, 0))


def _bpf(command: int, attributes: bytes) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    number = SYSCALLS.get(platform.machine())
    if number is None:
        raise OSError(f"no number of bpf(2) is known for {platform.machine()}")
    returned: int = libc.syscall(number, command, ctypes.create_string_buffer(attributes, 128), 128)
    if returned < 0:
        raise OSError(ctypes.get_errno(), f"bpf(2): {os.strerror(ctypes.get_errno())}")
    return returned


def main(link: str, share: str) -> None:
    """Attach the filter to a link, in both directions."""
    with tempfile.TemporaryDirectory() as directory:
        _run("mount", "-t", "bpf", "bpf", directory)
        try:
            file = Path(directory, "loss")
            pin(program(float(share)), file)
            _run("tc", "qdisc", "replace", "dev", link, "clsact")
            for direction in ("ingress", "egress"):
                _run("tc", "filter", "replace", "dev", link, direction, "pref", "1", "handle", "1", "bpf",
                     "direct-action", "object-pinned", str(file))
        finally:
            _run("umount", directory)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"`{' '.join(command)}`: {done.stderr.strip()}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except OSError as error:
        sys.exit(str(error))
