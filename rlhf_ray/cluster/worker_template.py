"""The process from which workers of a local cluster are forked: it has imported the libraries of their roles, once for
all of them.

Run as `python worker_template.py DIRECTORY SOCKET MODULE...`. It imports the modules, then forks a process for each
request at the socket (a file descriptor). The process answers the request and goes on as the Python program that this
names: with its arguments, environment, open files, limits and priorities. The template has one thread and uses none of
the libraries, so that nothing is in the middle of something when it forks. It ends when its standard input does, which
is the driver's, and removes the directory of the socket.

It imports the standard library alone, besides what it is told to.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import runpy
import selectors
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

READY = b"ready"
"""Sent to a caller before it sends its request; see `forked_worker`."""
FORKED = b"forked"
"""Sent to a caller by the process that was forked for it."""
REQUEST_S = 10.0
"""Longest wait for a request whose caller is there."""


def main(directory: str, listener: socket.socket, modules: list[str]) -> None:
    """Import the modules and serve the socket, in this process, and go on as a program in each that it forks."""
    before = dict(os.environ)
    listener.set_inheritable(False)
    with listener:  # requests wait there during the imports
        for name in modules:
            importlib.import_module(name)
        if "ray" in sys.modules:  # it has looked for the cluster's token, and has threads
            sys.exit("a template must not import Ray")
        set_by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
        gc.collect()
        gc.freeze()  # otherwise each worker's garbage collector would write to, and so copy, all of this memory
        request, files = _next_request(listener, directory)
    _become(request, files, before, set_by_imports)
    runpy.run_path(sys.argv[0], run_name="__main__")


def _next_request(listener: socket.socket, directory: str) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request. Returns it, and its standard files, in the new process only; this process ends with its
    standard input."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes workers that have ended
    with selectors.DefaultSelector() as events:
        events.register(listener, selectors.EVENT_READ)
        events.register(sys.stdin, selectors.EVENT_READ)
        while True:
            if any(key.fileobj is sys.stdin for key, _ in events.select()):
                shutil.rmtree(directory, ignore_errors=True)  # the driver may have been killed
                sys.exit()
            caller, _ = listener.accept()
            with caller:
                found = _answer(caller)
            if found is not None:
                return found


def _answer(caller: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork; returns the request in the new process, None in this one."""
    caller.settimeout(REQUEST_S)
    files: list[int] = []
    try:
        caller.sendall(READY)
        size, files, _, _ = socket.recv_fds(caller, 4, maxfds=3)
        with caller.makefile("rb") as stream:
            body = stream.read(int.from_bytes(size))
        request = json.loads(body)
        if os.fork() == 0:
            _confirm(caller)
            return request, files
    except (OSError, ValueError):  # the caller has ended
        pass
    for each in files:
        os.close(each)
    return None


def _confirm(caller: socket.socket) -> None:
    """Answer for the new process, which ends if nobody waits for it any more."""
    try:
        caller.sendall(FORKED)
    except OSError:
        os._exit(1)


def _become(request: Mapping[str, Any], files: list[int], before: Mapping[str, str], set_by_imports: Mapping[str, str]
            ) -> None:
    """Give this process what the process of the request would have as a program of its own.

    Args:
        before: the environment before the imports.
        set_by_imports: variables that they have set, which they would have set there as well.
    """
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    for number, each in enumerate(files):
        os.dup2(each, number)
        os.close(each)
    given: dict[str, str] = request["environment"]
    os.environ.clear()
    os.environ.update(given)
    os.environ.update({name: value for name, value in set_by_imports.items() if given.get(name) == before.get(name)})
    tempfile.tempdir = None  # an import may have looked for it, and TMPDIR is another
    if "numpy.random" in sys.modules:  # its generator is seeded when it is imported; Python's own is after each fork
        sys.modules["numpy.random"].seed()
    os.chdir(request["directory"])
    os.umask(request["umask"])
    for limit, soft, hard in request["limits"]:
        if resource.getrlimit(limit) != (soft, hard):
            resource.setrlimit(limit, (soft, hard))
    os.setpriority(os.PRIO_PROCESS, 0, request["priority"])
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(request["oom_score_adj"])
    sys.argv = request["arguments"]


if __name__ == "__main__":
    package = str(Path(__file__).parents[2])  # with its folder, which the driver may have from its script's
    if package not in sys.path:
        sys.path.insert(0, package)
    main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), sys.argv[3:])
