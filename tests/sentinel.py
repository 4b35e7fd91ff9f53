"""Poison that does no harm: whoever unpickles it has made a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Sentinel:
    """Pickles as a call that makes the file `path`."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")
