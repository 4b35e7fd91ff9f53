"""A run with a secret, watched from outside: where the secret may be seen, and which doors stand open meanwhile."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from ray.dashboard.consts import DASHBOARD_METRIC_PORT

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.tokenizer import tokenizer_digest
from rlhf_ray.models.loading import load_tokenizer
from tests.cluster.conftest import SMALL
from tests.unit.rewards.http.fault_server import faulty_in_thread

pytestmark = pytest.mark.cluster
CANARY = "canary-3f9d2c71b6a84e05"


@pytest.fixture
def ray_files():
    """A short name (Ray's sockets lie below it) for what Ray writes."""
    path = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def look_at(process, seen):
    """Add what anybody on the machine may read of a process, and the addresses it listens at."""
    with suppress(psutil.Error):
        command = process.cmdline()
        seen["text"].update([" ".join(command), *(f"{k}={v}" for k, v in process.environ().items())])
        seen["names"].add(process.name())
        if any("dashboard/dashboard.py" in part for part in command):
            seen["dashboard"].update((c.laddr.ip, c.laddr.port) for c in process.net_connections("inet")
                                     if c.status == psutil.CONN_LISTEN)


def watched(command, environment):
    """Output of a command that ended well, and what was seen of it and its descendants."""
    seen = {"text": set(), "names": set(), "dashboard": set()}
    with tempfile.TemporaryFile("w+") as output:
        run = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True)
        try:
            until = time.monotonic() + 200
            while run.poll() is None and time.monotonic() < until:
                with suppress(psutil.NoSuchProcess):
                    for process in [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]:
                        look_at(process, seen)
                time.sleep(0.7)
        finally:
            if run.poll() is None:
                run.terminate()
            run.wait(60)
        output.seek(0)
        text = output.read()
    assert run.returncode == 0, text[-3000:]
    return text, seen


def holding(secret, directory):
    """Files below a directory with the secret in them."""
    return [path for path in directory.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def test_a_reward_services_token_is_nowhere_to_be_seen_and_the_dashboard_is_for_this_machine(
    files, configure, tmp_path, ray_files
):
    (tmp_path / "token").write_text(CANARY)
    digest = tokenizer_digest(load_tokenizer(ModelConfig(path=str(files.policy))))
    with faulty_in_thread(tokenizer=digest) as server:
        far = {"type": "http", "urls": [server.url], "send": "tokens", "token_file": str(tmp_path / "token")}
        file = configure(tmp_path / "run", **SMALL, run={"steps": 1}, rewards={"far": far},
                         cluster={"dashboard": True}, checkpoint={"every": 1})
        output, seen = watched([sys.executable, "-m", "rlhf_ray.cli.main", "ppo", str(file)],
                               {**os.environ, "RAY_TMPDIR": str(ray_files)})
        assert server.asked and all(a.headers["authorization"] == f"Bearer {CANARY}" for a in server.asked)
    written = {path.name for path in (tmp_path / "run").rglob("*")}
    assert {"config.yaml", "report.html", "ledger.sqlite", "coordinator.json", "summary.json"} <= written
    assert any("ray::" in name for name in seen["names"]) and any(ray_files.rglob("*.log")), "nothing was watched"
    assert holding(CANARY, tmp_path / "run") + holding(CANARY, ray_files) == []
    assert CANARY not in output and not [text for text in seen["text"] if CANARY in text]
    port = int(re.search(r"Ray dashboard at http://127\.0\.0\.1:(\d+)", output)[1])
    assert {ip for ip, at in seen["dashboard"] if at == port} == {"127.0.0.1"}
    assert {at for _, at in seen["dashboard"]} <= {port, DASHBOARD_METRIC_PORT}
