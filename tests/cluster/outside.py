"""A run as processes of its own, watched from outside: its numbers on Ray's metrics endpoint, what anybody on the
machine may see of it, how it takes a signal, and how it goes on."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.tokenizer import tokenizer_digest
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.observability.metrics import read_metrics
from rlhf_ray.replay.audit import audit
from rlhf_ray.replay.ledger import open_for_reading
from tests.cluster.tiny import SMALL
from tests.unit.rewards.http.fault_server import FaultServer, faulty_in_thread

T = TypeVar("T")
SECRET = "canary-3f9d2c71b6a84e05"
"""The token of the run's reward service."""
LOOK_S = 0.7
"""Between two looks at a run's processes."""


def command_line(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """A `rlhf-ray` process in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "rlhf_ray.cli.main", *arguments], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "RAY_metrics_report_interval_ms": "1000", **environment},
        process_group=0,
    )


def wait_for(what: Callable[[], T], run: subprocess.Popen[str], timeout_s: float = 200) -> T:
    """The first true value of `what()`; fails when the run ends or the time passes."""
    until = time.monotonic() + timeout_s
    while not (found := what()):
        if run.poll() is not None:
            output, errors = run.communicate()
            pytest.fail(f"the run ended with {run.returncode}:\n{output}\n{errors}")
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.1)
    return found


def start(file, log, *more):
    """A `rlhf-ray ppo` process whose output goes to the file `log`."""
    with log.open("a") as out:
        return subprocess.Popen([sys.executable, "-m", "rlhf_ray.cli.main", "ppo", str(file), *more], stdout=out,
                                stderr=out)


def wait_for_step(directory, step, run, log):
    """Wait until the run has written the row of a training step."""
    until = time.monotonic() + 300
    while not any(row["step"] >= step and "reward/mean" in row for row in rows_of(directory)):
        assert run.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)


def rows_of(directory):
    return read_metrics(directory) if directory.is_dir() else []


def free_port() -> int:
    """One that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def gauge(text: str, name: str, **labels: str) -> float | None:
    """Value of a gauge of this run with these labels on the endpoint, or None."""
    wanted = {f'{label}="{value}"' for label, value in (labels | {"run": "run"}).items()}
    found = re.finditer(rf"^{name}\{{([^}}]*)\}} (\S+)$", text, re.M)
    return next((float(line[2]) for line in found if wanted <= set(line[1].split(","))), None)


def shown(port: int) -> str:
    """The text of Ray's metrics endpoint once the run's gauges are on it, else empty."""
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text: str = answer.read().decode()
        return text if gauge(text, "ray_rlhf_reward_mean") is not None else ""
    return ""


@dataclass
class Seen:
    """What anybody on the machine may read of a run's processes."""

    text: set[str] = field(default_factory=set)
    """Command lines and variables of environments."""
    names: set[str] = field(default_factory=set)
    dashboard: set[tuple[str, int]] = field(default_factory=set)
    """Addresses at which the dashboard listens."""
    _looked: float = 0.0

    def look(self, pid: int) -> None:
        """Look at a process and its descendants, unless that was just done."""
        if time.monotonic() - self._looked < LOOK_S:
            return
        with suppress(psutil.NoSuchProcess):
            for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
                self._look_at(process)
        self._looked = time.monotonic()

    def _look_at(self, process: psutil.Process) -> None:
        with suppress(psutil.Error):
            command = process.cmdline()
            self.text.update([" ".join(command), *(f"{k}={v}" for k, v in process.environ().items())])
            self.names.add(process.name())
            if any("dashboard/dashboard.py" in part for part in command):
                self.dashboard.update((c.laddr.ip, c.laddr.port) for c in process.net_connections("inet")
                                      if c.status == psutil.CONN_LISTEN)


@dataclass
class InterruptedRun:
    """A long run that one SIGTERM ended after its gauges were seen, sent to all of its process group as schedulers do;
    and what was true right after it."""

    directory: Path
    file: Path
    ray_files: Path
    """Where Ray wrote."""
    server: FaultServer
    """The reward service."""
    seen: Seen
    gauges: str
    code: int
    output: str
    errors: str
    names: set[str]
    """Of what was in the directory."""
    rows: list[dict[str, Any]]
    family: int
    """Processes it had."""
    left: list[psutil.Process]
    """Those that were still there."""
    problems: list[str]
    """What the audit found."""


@pytest.fixture(scope="session")
def interrupted(configure, files, tmp_path_factory) -> Iterator[InterruptedRun]:
    root = tmp_path_factory.mktemp("interrupted")
    ray_files = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a short name: Ray's sockets lie below it
    (root / "token").write_text(SECRET)
    digest = tokenizer_digest(load_tokenizer(ModelConfig(path=str(files.policy))))
    port = free_port()
    with faulty_in_thread(tokenizer=digest) as server:
        far = {"type": "http", "urls": [server.url], "send": "tokens", "token_file": str(root / "token"), "weight": 0.5}
        file = configure(
            root / "run", **SMALL, run={"steps": 100_000}, checkpoint={"every": 0},
            rewards={"main": {"type": "model", "path": str(files.reward)}, "far": far},
            cluster={"metrics_port": port, "dashboard": True}, logging={"ray_metrics": True, "samples": "off"})
        try:
            yield interrupt(file, root / "run", port, server, ray_files)
        finally:
            shutil.rmtree(ray_files)


def interrupt(file: Path, directory: Path, port: int, server: FaultServer, ray_files: Path) -> InterruptedRun:
    """Begin the run, wait for its gauges, and send the signal."""
    seen, run = Seen(), command_line("ppo", str(file), RAY_TMPDIR=str(ray_files))

    def look() -> str:
        seen.look(run.pid)
        return shown(port)

    try:
        gauges = wait_for(look, run)
        family = psutil.Process(run.pid).children(recursive=True)
        os.killpg(run.pid, signal.SIGTERM)
        output, errors = run.communicate(timeout=90)
    finally:
        if run.poll() is None:
            run.kill()
    _, alive = psutil.wait_procs(family, timeout=15)
    with closing(open_for_reading(directory / "ledger.sqlite")) as db:
        problems = audit(db, ended=False)
    return InterruptedRun(
        directory, file, ray_files, server, seen, gauges, run.returncode, output, errors,
        {path.name for path in directory.iterdir()}, read_metrics(directory), len(family),
        [p for p in alive if p.status() != psutil.STATUS_ZOMBIE], problems)


@dataclass(frozen=True)
class Resumed:
    """How the interrupted run went on for two steps more, to its end."""

    code: int
    output: str
    errors: str


@pytest.fixture(scope="session")
def resumed_outside(interrupted) -> Resumed:
    run = command_line("ppo", str(interrupted.file), "--resume", f"--run.steps={interrupted.rows[-1]['step'] + 2}",
                       RAY_TMPDIR=str(interrupted.ray_files))
    output, errors = run.communicate(timeout=200)
    return Resumed(run.returncode, output, errors)
