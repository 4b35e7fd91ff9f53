"""Asks the template at a socket for a process that becomes a worker in place of this one.

Ray runs it as `python -I -S forked_worker.py SOCKET PYTHON default_worker.py ...` instead of that Python program (a
runtime environment's `py_executable`), and it starts in some milliseconds because it imports little. Where no process
was forked, because there is no template, or it is not ready in time, or it ended, this one becomes the Python program
itself.
"""

import json
import os
import resource
import signal
import socket
import sys

READY_S = 40.0
"""Longest wait for the template, which is ready when it has imported its modules. Ray gives a worker a minute to
register (`worker_register_timeout_seconds`)."""


def main(path: str, python: str, arguments: list[str]) -> None:
    """Become a worker, by the template or here."""
    if not is_forked(path, arguments):
        os.execv(python, [python, *arguments])  # noqa: S606 - the program that Ray named


def is_forked(path: str, arguments: list[str]) -> bool:
    """Ask the template; returns whether there is a worker, which answers itself."""
    with socket.socket(socket.AF_UNIX) as template:
        template.settimeout(READY_S)
        try:
            template.connect(path)
            if not template.recv(16):
                return False
            template.settimeout(None)  # the worker may be there from now on
            body = json.dumps(request(arguments)).encode()
            socket.send_fds(template, [len(body).to_bytes(4)], [0, 1, 2])
            template.sendall(body)
            return bool(template.recv(16))
        except OSError:  # also TimeoutError
            return False


def request(arguments: list[str]) -> dict[str, object]:
    """What the worker is to have of this process."""
    umask = os.umask(0o077)
    os.umask(umask)
    with open("/proc/self/oom_score_adj") as file:
        oom_score_adj = file.read()
    limits = {value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}
    return {
        "arguments": arguments,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "umask": umask,
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "limits": [(each, *resource.getrlimit(each)) for each in sorted(limits)],
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "oom_score_adj": oom_score_adj,
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
