"""Shared memory of one's own is seen by oneself alone."""

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import os, sys
from chaos.own_memory import own_shared_memory
if not own_shared_memory():
    sys.exit(9)
open(sys.argv[1], "w").close()
print(os.listdir("/dev/shm"), flush=True)
"""
HERE = Path("/dev/shm/rlhf_ray_seen_by_one_alone")


def test_what_lies_there_is_not_seen_outside_and_nothing_else_is_seen_inside():
    done = subprocess.run([sys.executable, "-c", CODE, str(HERE)], capture_output=True, text=True,
                          cwd=Path(__file__).parents[3])
    if done.returncode == 9:
        pytest.skip("mounting requires root")
    assert done.stdout.strip() == str([HERE.name]), done.stderr
    assert not HERE.exists()
