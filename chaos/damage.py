"""Damage to the newest checkpoint of a run that is down."""

from __future__ import annotations

from pathlib import Path

from chaos.plan import Fault
from rlhf_ray.checkpoint.atomic import files_under
from rlhf_ray.checkpoint.manifest import verify_manifest
from rlhf_ray.errors import CheckpointError


def damage(fault: Fault, checkpoints: Path) -> str | None:
    """Damage the newest whole checkpoint as the fault says; in words, or None where there is no other to go on from."""
    whole = whole_checkpoints(checkpoints)
    if len(whole) < 2:
        return None
    files = [path for path in files_under(whole[-1]) if path.stat().st_size]
    file = files[int(fault.place * len(files))]
    size = file.stat().st_size
    if fault.kind == "checkpoint_delete":
        file.unlink()
        done = "deleted"
    elif fault.kind == "checkpoint_truncate":
        left = int(fault.place * size)
        with file.open("r+b") as opened:
            opened.truncate(left)
        done = f"cut from {size} to {left} bytes"
    else:
        place = int(fault.place * size)
        data = bytearray(file.read_bytes())
        data[place] ^= 1 << int(fault.place * 1000) % 8
        file.write_bytes(data)
        done = f"a bit of byte {place} of {size} flipped"
    return f"{file.relative_to(checkpoints)}: {done}"


def whole_checkpoints(checkpoints: Path) -> list[Path]:
    """Those whose every byte is right, oldest first."""
    return [path for path in sorted(checkpoints.glob("step_*"), key=_step) if _is_whole(path)]


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _is_whole(path: Path) -> bool:
    try:
        verify_manifest(path)
    except CheckpointError:
        return False
    return True
