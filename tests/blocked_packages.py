"""An environment for Python processes that do not find some packages, as if they were not installed."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
HIDE = """from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
PathFinder.find_spec = staticmethod(
    lambda name, *more: None if name.partition(".")[0] in {names!r} else find_spec(name, *more))
"""


def without(directory: Path, *names: str) -> dict[str, str]:
    """Variables of an environment without these packages; `directory` gets a file that Python reads at its start."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(HIDE.format(names=set(names)))
    return {**os.environ, "PYTHONPATH": f"{directory}{os.pathsep}{ROOT}"}
