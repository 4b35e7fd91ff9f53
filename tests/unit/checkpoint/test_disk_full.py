"""A disk that runs full while a checkpoint is written, on a real file system of 4 MiB."""

import errno
import os
import subprocess

import numpy as np
import pytest
import torch

from rlhf_ray.checkpoint.disk_space import is_disk_full
from rlhf_ray.checkpoint.state_files import save_state
from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.errors import CheckpointError
from tests.checkpoints import new_checkpoint


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small tmpfs failed: {mounted.stderr.decode().strip()}")
    yield place
    # Lazily: the traceback of a failed test may still hold a file open.
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def write_file(tmp):
    (tmp / "file").write_bytes(b"x" * (5 << 20))


def write_torch(tmp):
    torch.save({"weights": torch.zeros(5 << 18)}, tmp / "rank_0.pt")


def write_safetensors(tmp):
    from safetensors.torch import save_file

    save_file({"weights": torch.zeros(5 << 18)}, tmp / "model.safetensors")


def write_json(tmp):
    save_state(tmp / "state.json", {"array": np.zeros(5 << 20, dtype=np.uint8)})


@pytest.mark.parametrize("write", [write_file, write_torch, write_safetensors, write_json])
def test_a_full_disk_leaves_the_previous_checkpoint_and_says_so(small_disk, write):
    store = CheckpointStore(small_disk / "checkpoints", keep=2)
    with new_checkpoint(store, 1) as tmp:
        (tmp / "file").write_bytes(b"x" * 1000)
    message = r"ran full: checkpoint of step 2 needs more than .*step_1 is intact"
    with pytest.raises(CheckpointError, match=message), new_checkpoint(store, 2) as tmp:
        write(tmp)
    assert [path.name for path in store.root.iterdir()] == ["step_1"]
    assert store.latest()[0] == 1


def test_a_full_disk_at_commit_says_so(small_disk):
    store = CheckpointStore(small_disk / "checkpoints", keep=2)
    tmp = store.begin(1)
    (tmp / "file").write_bytes(b"x" * 1000)
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(b"x" * (5 << 20))
    with pytest.raises(CheckpointError, match=r"ran full: .* no earlier checkpoint exists"):
        store.commit(tmp, 1)
    assert list(store.root.iterdir()) == []


def test_an_ordinary_error_with_space_left_is_not_called_a_full_disk(small_disk):
    store = CheckpointStore(small_disk / "checkpoints", keep=2)
    with pytest.raises(RuntimeError, match="a worker died"), new_checkpoint(store, 1):
        raise RuntimeError("a worker died")


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "as the system says"), True),
        (OSError(errno.EDQUOT, "as the system says"), True),
        (ValueError("I/O error: No space left on device (os error 28)"), True),
        (ValueError("I/O error: Disk quota exceeded (os error 122)"), True),
        (OSError(errno.EACCES, "Permission denied"), False),
        (RuntimeError("unexpected pos 576 vs 534"), False),
    ],
)
def test_a_full_disk_is_recognised_by_code_or_words_while_space_is_left(tmp_path, error, full):
    assert is_disk_full(error, tmp_path) == full
