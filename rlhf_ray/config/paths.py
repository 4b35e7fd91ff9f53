"""Paths that a user gives: `~` and environment variables are expanded once, where the path enters."""

import os
import re
from typing import Annotated

from pydantic import AfterValidator

HOME = re.compile(r"(?:(?:file|local)://)?(~[^/:]*)")
"""A home directory at the beginning of a path or of a local URL."""
LONGEST_PATH, LONGEST_NAME = 4095, 255
"""In bytes, on Linux (limits.h: PATH_MAX without the zero at its end, NAME_MAX)."""
VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w*|\{\w*\})")


def expand_path(text: str) -> str:
    """`text` with `~`, `~user`, `$NAME` and `${NAME}` replaced; a Hub name or a URL without them is unchanged.

    Raises:
        ValueError: there is no such user or variable, or no file can have such a path; says which.
    """
    scheme, separator, path = text.rpartition("://") if HOME.match(text) else ("", "", text)
    expanded = os.path.expandvars(os.path.expanduser(path))
    if (home := HOME.match(text)) and expanded.startswith("~"):
        raise ValueError(f"{text!r} begins with {home[1]}, which is no user's home directory here; write the whole "
                         "path, or ./ before it if the name begins so")
    if unset := [each[0] for each in VARIABLE.finditer(path) if not os.environ.get(each[0].strip("${}"))]:
        raise ValueError(f"{text!r} contains {unset[0]}, which is not set in this environment, or empty; set it, or "
                         "write the whole path")
    if "://" not in text:
        _check_length(expanded)
    return f"{scheme}{separator}{expanded}"


def _check_length(path: str) -> None:
    if not path or "\0" in path:
        raise ValueError(f"{path!r} is no path: it is empty, or contains a zero byte")
    names = [len(name.encode()) for name in path.split("/")]
    if max(names) > LONGEST_NAME or len(path.encode()) > LONGEST_PATH:
        shown = f"{path[:60]}..."
        raise ValueError(f"{shown!r} has {len(path.encode())} bytes, {max(names)} of them in one name, and Linux "
                         f"allows {LONGEST_PATH} and {LONGEST_NAME}; give a shorter path")


UserPath = Annotated[str, AfterValidator(expand_path)]
"""A path, or a name that may be one: a model, a data set, `file.py:function`, a scorer. Every field that holds one has
this type."""
