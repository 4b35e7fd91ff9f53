"""Runs a policy's program inside of its sandbox. It is given to a new interpreter as text (`python -c`), because the
files of this package cannot be read there; so it imports nothing of it.

A job is a line of JSON on descriptor 3; what it tells the worker are lines on descriptor 4. Both belong to the program
as much as to this module, so that nothing here is secret from a program that looks for it.
"""

import json
import linecache
import os
import sys
import traceback
import types
from typing import Any

JOB, CHANNEL = 3, 4
FILE = "program.py"


def main() -> None:
    """Run the job's program, and what the job wants of it."""
    jobs = os.fdopen(JOB, "rb")
    job = json.loads(jobs.readline())
    sys.path.extend(job["paths"])
    sys.argv = [FILE]
    module = types.ModuleType(job["name"])
    sys.modules[job["name"]] = module
    module.__dict__["__builtins__"] = __builtins__
    _run(job["setup"], module, "setup.py")
    if job["kind"] == "script":
        jobs.close()
        os.close(CHANNEL)
        _run(job["code"], module, FILE)
    elif job["kind"] == "session":
        for line in jobs:
            _turn(json.loads(line)["code"], module)
    else:
        _run(job["code"], module, FILE)
        _tell("loaded")
        wanted = json.loads(jobs.readline())
        if job["kind"] == "check":
            _run(wanted["tests"], module, "tests.py")
            verdict = ""
        else:
            verdict = _called(module, wanted["function"], wanted["arguments"])
        sys.stdout.flush()  # it is killed when it has told
        _tell(f"{wanted['token']} {verdict}")


def _called(module: types.ModuleType, function: str, arguments: list[Any]) -> str:
    """The result as JSON, of a function of the program or a method of its class Solution."""
    owner = module.Solution() if hasattr(module, "Solution") else module
    return json.dumps(getattr(owner, function)(*arguments), default=lambda value: value.tolist())


def _turn(code: str, module: types.ModuleType) -> None:
    """One program of several that share their names."""
    try:
        _execute(code, module, FILE)
    except Exception as error:
        _show(error)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    _tell("done")


def _run(code: str, module: types.ModuleType, file: str) -> None:
    try:
        _execute(code, module, file)
    except Exception as error:
        _show(error)
        sys.exit(1)


def _execute(code: str, module: types.ModuleType, file: str) -> None:
    linecache.cache[file] = len(code), None, code.splitlines(keepends=True), file
    exec(compile(code, file, "exec"), module.__dict__)  # noqa: S102 - what a sandbox is for


def _show(error: Exception) -> None:
    """Print a traceback that begins in the program."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == THIS:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def _tell(line: str) -> None:
    os.write(CHANNEL, line.encode() + b"\n")


THIS = main.__code__.co_filename

if __name__ == "__main__":
    main()
