"""The NVIDIA GPUs of this machine, as nvidia-smi tells of them. Looks only, and imports nothing heavy."""

import shutil
import subprocess
from dataclasses import dataclass

QUERY_S = 20.0
"""Longest wait for an answer; a driver that is broken may give none."""


@dataclass(frozen=True)
class GPU:
    """What nvidia-smi says of one."""

    name: str
    gib: float
    """Memory."""
    driver: str


def gpus_here() -> list[GPU]:
    """All of them; none without nvidia-smi, or with a driver that does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [gpu for line in answer.stdout.splitlines() if (gpu := read_gpu(line)) is not None]


def read_gpu(line: str) -> GPU | None:
    """One line of the answer: "NVIDIA H100 80GB HBM3, 81559, 580.95.05" (MiB); None where it tells no memory: "[N/A]"
    of GPUs that share the processor's, and other messages."""
    row = [part.strip() for part in line.split(",")]
    return GPU(row[0], float(row[1]) / 1024, row[2]) if len(row) == 3 and row[1].isdecimal() else None
