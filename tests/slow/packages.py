"""Packages in environments of their own, and servers that are written with them."""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

INSTALL_S = 1800
START_S = 120


def python_with(requirement: str, place: Path, version: str = "") -> Path:
    """An interpreter that has a package. The test is skipped where it cannot be installed.

    Args:
        place: directory of the environment that is made.
        version: of Python, such as "3.12"; empty for that of the tests.
    """
    python = place / "bin/python"
    if uv := shutil.which("uv"):
        commands = [[uv, "venv", "--quiet", "--python", version or sys.executable, place],
                    [uv, "pip", "install", "--quiet", "--python", python, requirement]]
    elif found := shutil.which(f"python{version}") if version else sys.executable:
        commands = [[found, "-m", "venv", place], [python, "-m", "pip", "install", "--quiet", requirement]]
    else:
        pytest.skip(f"{requirement} needs Python {version}; there is neither python{version} nor uv")
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
        if done.returncode:
            pytest.skip(f"{requirement} cannot be installed here: {done.stderr[-300:]}")
    return python


@contextmanager
def serving(command: list[str | Path], *arguments: str, path: str = "/") -> Iterator[int]:
    """The port of a server, which is its first argument.

    Args:
        path: what it answers once it serves.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*command, str(port), *arguments])
    try:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False)
                break
            assert process.poll() is None, "the server ended"
            time.sleep(0.2)
        yield port
    finally:
        process.kill()
        process.wait()
