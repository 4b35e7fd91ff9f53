"""What all servers that are reached by a URL have in common."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

OPEN_S = 10.0
"""Longest time for a connection."""


def is_local(url: str) -> bool:
    """Whether it is this machine's, so that no proxy may come between."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


def token_headers(settings: Mapping[str, Any]) -> dict[str, str]:
    """The header with the token of a source's `token_variable`; none without one.

    Raises:
        ValueError: the variable is not set.
    """
    variable = settings["token_variable"]
    if variable is None:
        return {}
    if not os.environ.get(variable):
        raise ValueError(f"the environment variable {variable} (token_variable) is not set; set it on every node with "
                         "episode runners")
    return {"Authorization": f"Bearer {os.environ[variable]}"}
