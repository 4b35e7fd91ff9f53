"""The rehearsal of the GPU check, part by part: its code runs from end to end and finds nothing wrong."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.gpu_check.parts import PARTS
from tests.blocked_packages import without

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.cluster]
FOUND = {
    "seams": {"ok": 10, "figure": 5, "not run": 3},
    "learner": {"ok": 20, "figure": 12, "not run": 4},
    "engine": {"ok": 4, "figure": 6, "not run": 1},
    "cluster": {"ok": 7, "figure": 3},
}
"""Rows of each part by verdict."""


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("part", list(PARTS))
def test_the_rehearsal_on_the_cpu(part, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if part in ("seams", "learner"):  # as on an image without them
        environment = without(tmp_path / "site", "ray", "vllm")
    answer = subprocess.run([ROOT / "launch" / "gpu_check", "--cpu", "--part", part, "--out", tmp_path / "out"],
                            env={**environment, "PYTHON": sys.executable}, capture_output=True, text=True, timeout=2300)
    assert answer.returncode == 0, answer.stdout + (tmp_path / "out" / "log.txt").read_text()[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()][1:]
    assert {row["check"] for row in rows} == {check.name for check in PARTS[part].checks}
    assert Counter(row["verdict"] for row in rows) == FOUND[part]
