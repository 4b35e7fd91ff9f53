"""The disk that is filled, and the private /dev/shm."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.mounts import LEFT_BYTES, fill_disk, free_disk, resize_shared_memory, small_disk

CODE = """
import os, sys
from chaos.mounts import mount_private_shared_memory
if not mount_private_shared_memory():
    sys.exit(9)
open(sys.argv[1], "w").close()
print(os.listdir("/dev/shm"), flush=True)
"""
SEGMENT = Path("/dev/shm/rlhf_ray_seen_by_one_alone")


def test_a_disk_is_filled_and_freed_and_gone_afterwards(tmp_path):
    with small_disk(tmp_path / "disk") as mounted:
        if not mounted:
            pytest.skip("mounting a small tmpfs needs root")
        assert fill_disk(tmp_path / "disk") > 100 << 20
        with pytest.raises(OSError, match="No space"):
            (tmp_path / "disk/more").write_bytes(bytes(2 * LEFT_BYTES))
        free_disk(tmp_path / "disk")
        (tmp_path / "disk/more").write_bytes(bytes(2 * LEFT_BYTES))
    assert os.listdir(tmp_path / "disk") == []


def test_private_shared_memory_is_separate_in_both_directions():
    done = subprocess.run([sys.executable, "-c", CODE, str(SEGMENT)], capture_output=True, text=True,
                          cwd=Path(__file__).parents[3])
    if done.returncode == 9:
        pytest.skip("mounting requires root")
    assert done.stdout.strip() == str([SEGMENT.name]), done.stderr
    assert not SEGMENT.exists()


def test_shared_memory_that_is_not_private_is_never_resized():
    with pytest.raises(PermissionError, match="/dev/shm is not private"):
        resize_shared_memory("24m")
