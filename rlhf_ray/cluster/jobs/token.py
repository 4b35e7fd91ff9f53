"""The token that a Ray cluster asks for: where a person may keep it, and what to do without."""

import os
from pathlib import Path

from rlhf_ray.errors import ClusterError

VARIABLE, FILE_VARIABLE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
HOW = ("Copy the cluster's token to ~/.ray/auth_token (on its head node `ray get-auth-token` prints it), name its "
       f"file in {FILE_VARIABLE}, or put it into {VARIABLE}")


def find_token() -> str | None:
    """The token from the environment, or from the file where Ray keeps it; in Ray's own order.

    Raises:
        ClusterError: the file that the environment names cannot be read.
    """
    if token := os.environ.get(VARIABLE, "").strip():
        return token
    if named := os.environ.get(FILE_VARIABLE):
        try:
            return Path(named).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ClusterError(f"{FILE_VARIABLE}={named}: the token cannot be read: {error}") from error
    usual = Path.home() / ".ray" / "auth_token"
    return usual.read_text(encoding="utf-8").strip() or None if usual.is_file() else None
