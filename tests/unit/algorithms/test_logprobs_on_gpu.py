"""The Triton kernels of log-probabilities, in Triton's interpreter."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_kernels_compute_what_the_passes_on_cpus_do():
    checks = "tests/unit/algorithms/kernel_checks.py"
    answer = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", checks],
                            cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
                            timeout=120)
    assert answer.returncode == 0, answer.stdout[-6000:] + answer.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", answer.stdout)[1]) > 15
