"""A Ray cluster of one node with a job server, as `launch/node.sh head` makes one, in a process of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

TOKEN = "0123456789abcdef" * 2


@dataclass(frozen=True)
class Head:
    """The cluster, and how to speak to it."""

    url: str
    environment: dict[str, str]
    """Variables of a command that has the cluster's token; without the one that Ray's client prefers to options."""

    def command(self, *words: str, cwd: Path | None = None, **variables: str) -> subprocess.Popen[str]:
        """A `rlhf-ray` process that may speak to it."""
        return subprocess.Popen([sys.executable, "-m", "rlhf_ray.cli.main", *words], text=True, cwd=cwd,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**self.environment, **variables})

    def run(self, *words: str, cwd: Path | None = None, timeout_s: float = 60, **variables: str) -> tuple[int, str]:
        """Exit code and output of a `rlhf-ray` command."""
        process = self.command(*words, cwd=cwd, **variables)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
        return process.returncode, output


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def ray_head(cpus: int = 8) -> Iterator[Head]:
    """A head node that wants a token, on ports and in a directory of its own; nothing is left of it afterwards."""
    root = tempfile.mkdtemp(prefix="rh", dir="/tmp")  # short: sockets below have paths of at most 107 characters
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": root,
                    "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_USAGE_STATS_ENABLED": "0"}
    with Path(root, "ray.log").open("w") as log:
        process = subprocess.Popen(
            [Path(__file__).parents[2] / "launch/node.sh", "head", "--temp-dir", root, "--port", "0",
             "--dashboard-port", str(port), "--dashboard-agent-listen-port", "0",
             "--ray-client-server-port", str(free_port()), "--min-worker-port", "0", "--max-worker-port", "0",
             "--num-cpus", str(cpus), "--object-store-memory", str(128 * 2**20)],
            env=environment, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(url, process, Path(root, "ray.log"))
        # RAY_AUTH_MODE is the cluster's: whoever asks it needs the token alone.
        yield Head(url, {k: v for k, v in environment.items() if k != "RAY_AUTH_MODE"})
    finally:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=10)
        process.wait(timeout=10)
        shutil.rmtree(root, ignore_errors=True)


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path, timeout_s: float = 90) -> None:
    until = time.monotonic() + timeout_s
    while True:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/api/version", timeout=5).status_code == 401:
                return
        assert process.poll() is None and time.monotonic() < until, log.read_text()
        time.sleep(0.1)
