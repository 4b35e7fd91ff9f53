"""The rehearsal of the GPU check: its code runs from end to end and finds everything right."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def test_the_rehearsal_on_the_cpu(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    answer = subprocess.run([ROOT / "launch" / "gpu_check", "--cpu", "--out", tmp_path / "table.md"], env=environment,
                            capture_output=True, text=True, timeout=580)
    assert answer.returncode == 0, answer.stdout + answer.stderr[-3000:]
    table = (tmp_path / "table.md").read_text()
    for word in ("parity after object_store, ZeRO-1", "parity after nccl over gloo, ZeRO-3", "tokens/s", "GB/s",
                 "planned", "a step in turns"):
        assert word in table
    assert "WRONG" not in table and table.count("| ok |") == 4
