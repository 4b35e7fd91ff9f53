"""`rlhf-ray serve-reward` as a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

READY_S = 120


class ServiceProcess:
    """A running service."""

    def __init__(self, model: Path, *options: str) -> None:
        command = [sys.executable, "-m", "rlhf_ray.cli.main", "serve-reward", str(model), "--port", "0", *options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                         env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.pid = self._process.pid
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self.lines.append(line)
            if line.startswith("serving "):
                self._ready.set()

    @property
    def output(self) -> str:
        """Everything it printed."""
        return "".join(self.lines)

    @property
    def url(self) -> str:
        """Where it listens, once it does."""
        assert self._ready.wait(READY_S), self.output
        found = re.search(r"at (https?://\S+)", self.output)
        assert found
        return found[1]

    def health(self, token: str | None = None) -> dict[str, object]:
        """What /health says."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        answer: dict[str, object] = httpx.get(f"{self.url}/health", headers=headers, trust_env=False).json()
        return answer

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def wait(self, seconds: float = 30) -> int:
        """Its exit code, once it has ended and all it printed was read."""
        code = self._process.wait(seconds)
        self._reader.join(seconds)
        return code


@contextmanager
def services(*commands: tuple[object, ...]) -> Iterator[list[ServiceProcess]]:
    """Processes for (model, *options), started side by side."""
    running = [ServiceProcess(Path(str(model)), *map(str, options)) for model, *options in commands]
    try:
        yield running
    finally:
        for service in running:
            if service._process.poll() is None:
                service.signal(signal.SIGKILL)
            service.wait()
