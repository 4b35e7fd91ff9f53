"""The whole check on a GPU: parity after each transport, turns, memory against plan."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.gpu


@pytest.mark.timeout(600)
def test_everything_is_right(tmp_path):
    answer = subprocess.run([sys.executable, "-m", "benchmarks.gpu_check", "--out", tmp_path / "table.md"], cwd=ROOT,
                            capture_output=True, text=True, timeout=590)
    assert answer.returncode == 0, answer.stdout + answer.stderr[-3000:]
    table = (tmp_path / "table.md").read_text()
    for word in ("parity after object_store", "parity after ipc", "tokens/s", "GB/s", "planned", "a step in turns"):
        assert word in table
