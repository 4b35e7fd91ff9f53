"""One line of `rlhf-ray doctor`."""

from dataclasses import dataclass
from importlib import metadata
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One thing looked at. "warn" may matter, "fail" stops runs."""

    status: Literal["ok", "warn", "fail"]
    name: str
    found: str
    advice: str = ""


def installed(package: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
