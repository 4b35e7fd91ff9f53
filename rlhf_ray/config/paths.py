"""Paths that a user gives: `~` and environment variables are expanded once, where the path enters."""

import os
import re
from typing import Annotated

from pydantic import AfterValidator

HOME = re.compile(r"(?:(?:file|local)://)?(~[^/:]*)")
"""A home directory at the beginning of a path or of a local URL."""
VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w*|\{\w*\})")


def expand_path(text: str) -> str:
    """`text` with `~`, `~user`, `$NAME` and `${NAME}` replaced; a Hub name or a URL without them is unchanged.

    Raises:
        ValueError: there is no such user or variable; names it.
    """
    scheme, separator, path = text.rpartition("://") if HOME.match(text) else ("", "", text)
    expanded = os.path.expandvars(os.path.expanduser(path))
    if (home := HOME.match(text)) and expanded.startswith("~"):
        raise ValueError(f"{text!r} begins with {home[1]}, which is no user's home directory here; write the whole "
                         "path, or ./ before it if the name begins so")
    if unset := [each[0] for each in VARIABLE.finditer(path) if not os.environ.get(each[0].strip("${}"))]:
        raise ValueError(f"{text!r} contains {unset[0]}, which is not set in this environment, or empty; set it, or "
                         "write the whole path")
    return f"{scheme}{separator}{expanded}"


UserPath = Annotated[str, AfterValidator(expand_path)]
"""A path, or a name that may be one: a model, a data set, `file.py:function`, a scorer. Every field that holds one has
this type."""
