"""An environment of TRL's own, made by uv beside ours: its versions must not meet those of the project."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from benchmarks.side_process import SideFailed

PACKAGES = ("trl==1.12.0", f"torch=={version('torch')}", f"transformers=={version('transformers')}")
"""The last TRL with a PPO trainer; torch and transformers are those of our side."""
CACHE = Path(__file__).parents[1] / ".cache"
TIMEOUT_S = 900


def trl_python(home: Path = CACHE / "trl") -> Path:
    """The interpreter of the environment; made at the first call (seconds, some minutes with a slow registry).

    Raises:
        SideFailed: it cannot be installed; quotes the installer.
    """
    python, stamp = home / "bin" / "python", home / "installed"
    wanted = "\n".join(PACKAGES)
    if not (python.is_file() and stamp.is_file() and stamp.read_text() == wanted):
        install([uv(), "venv", "--clear", "--python", sys.executable, str(home)])
        install([uv(), "pip", "install", "--python", str(python), *sources(), *PACKAGES])
        stamp.write_text(wanted)
    return python


def install(command: list[str]) -> None:
    """Run one command of the installer; pip's folders of wheels are uv's too."""
    links = os.environ.get("PIP_FIND_LINKS")
    found = {"UV_FIND_LINKS": links.replace(" ", ",")} if links and "UV_FIND_LINKS" not in os.environ else {}
    index = os.environ.get("PIP_INDEX_URL")
    found |= {"UV_DEFAULT_INDEX": index} if index and "UV_DEFAULT_INDEX" not in os.environ else {}
    try:
        done = subprocess.run(command, env={**os.environ, **found}, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise SideFailed(f"TRL's environment: {' '.join(command)} took over {TIMEOUT_S} s") from None
    if done.returncode:
        raise SideFailed(f"TRL's environment: {' '.join(command)} failed:\n{done.stderr[-2000:]}")


def sources() -> list[str]:
    """Where the CPU build of torch comes from, when no folder of wheels has it."""
    return [] if os.environ.get("PIP_FIND_LINKS") or os.environ.get("UV_FIND_LINKS") else ["--torch-backend=cpu"]


def uv() -> str:
    """The uv that installed the project."""
    return str(Path(sys.executable).with_name("uv"))
