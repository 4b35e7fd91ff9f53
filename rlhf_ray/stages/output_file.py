"""The file that a command writes at its end: seen to be writable at its beginning."""

import tempfile
from pathlib import Path

from rlhf_ray.errors import ConfigError


def check_output(path: Path) -> None:
    """Make the folder of `path`, and see that files can be written there.

    Raises:
        ConfigError: they cannot, or `path` is a folder.
    """
    if path.is_dir():
        raise ConfigError(f"--output {path} is a folder; name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror or error}; name a file in a folder that "
                          "may be written to") from error
