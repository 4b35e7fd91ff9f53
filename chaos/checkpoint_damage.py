"""Damage to the newest checkpoint of a run whose driver is down."""

from __future__ import annotations

from pathlib import Path

from chaos.faults import Fault
from rlhf_ray.checkpoint.atomic_directory import files_under
from rlhf_ray.checkpoint.manifest import verify_manifest
from rlhf_ray.errors import CheckpointError


def damage(fault: Fault, checkpoints: Path) -> str | None:
    """Damage the newest valid checkpoint as the fault says.

    Returns:
        A description of the damage; None where no other valid checkpoint would be left to resume from.
    """
    valid = valid_checkpoints(checkpoints)
    if len(valid) < 2:
        return None
    files = [path for path in files_under(valid[-1]) if path.stat().st_size]
    file = files[int(fault.position * len(files))]
    size = file.stat().st_size
    if fault.kind == "checkpoint_delete":
        file.unlink()
        done = "deleted"
    elif fault.kind == "checkpoint_truncate":
        length = int(fault.position * size)
        with file.open("r+b") as opened:
            opened.truncate(length)
        done = f"cut from {size} to {length} bytes"
    else:
        offset = int(fault.position * size)
        data = bytearray(file.read_bytes())
        data[offset] ^= 1 << int(fault.position * 1000) % 8
        file.write_bytes(data)
        done = f"a bit of byte {offset} of {size} flipped"
    return f"{file.relative_to(checkpoints)}: {done}"


def valid_checkpoints(checkpoints: Path) -> list[Path]:
    """The checkpoints whose every byte matches the manifest, oldest first."""
    return [path for path in sorted(checkpoints.glob("step_*"), key=_step) if _is_valid(path)]


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _is_valid(path: Path) -> bool:
    try:
        verify_manifest(path)
    except CheckpointError:
        return False
    return True
