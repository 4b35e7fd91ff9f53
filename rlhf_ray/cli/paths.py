"""Paths among the arguments of commands: typer calls one of these for each argument that is a path, or may be one."""

from pathlib import Path

from rlhf_ray.errors import ConfigError


def path_or_name(text: str) -> str:
    """A path or a Hub name, expanded as the paths of the configuration are (`config.paths`).

    Raises:
        ConfigError: there is no such home directory or variable.
    """
    from rlhf_ray.config.paths import expand_path

    try:
        return expand_path(str(text))
    except ValueError as error:
        raise ConfigError(f"the argument {error}") from None


def local_path(text: str) -> Path:
    """`path_or_name` as a path."""
    return Path(path_or_name(text))
