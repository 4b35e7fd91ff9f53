"""The check on a GPU, part by part; parts whose packages are missing here are skipped."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_check.parts import PARTS

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.gpu


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", PARTS.values(), ids=lambda part: part.name)
def test_nothing_is_wrong(part, tmp_path):
    if missing := part.missing():
        pytest.skip(f"{', '.join(missing)} not installed")
    answer = subprocess.run([sys.executable, "-m", "benchmarks.gpu_check", "--part", part.name, "--out", tmp_path],
                            cwd=ROOT, capture_output=True, text=True, timeout=1190)
    assert answer.returncode == 0, answer.stdout + (tmp_path / "log.txt").read_text()[-3000:]
    assert "| ok |" in (tmp_path / "table.md").read_text()
