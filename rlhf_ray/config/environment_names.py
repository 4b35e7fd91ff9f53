"""Environments by name: what `--environment` accepts."""

import re
from pathlib import Path

from rlhf_ray.config.config_layers import read_yaml
from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.config.paths import expand_path
from rlhf_ray.config.scorer_names import YAML, read_section
from rlhf_ray.errors import ConfigError

MAX_TOKENS = 4096
"""Tokens of an episode at most, where no file says: the KV cache of this machine has to hold several."""


def named_environments(name: str, max_turns: int | None = None, option: str = "--environment"
                       ) -> dict[str, EnvironmentConfig]:
    """The environments called `name`, by their names in the section: `file.py:name` or `module:name` of tools, of a
    class or of an environment, or a .yaml file with a section `environments`. User code is not loaded.

    Args:
        max_turns: of an episode; None: as the file says, or the default.
        option: the option with the name, for messages.

    Raises:
        ConfigError: it names no environment.
    """
    try:
        name = expand_path(name)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    if Path(name).suffix in YAML:
        values = read_yaml(Path(name)).values.get("environments")
        if not values:
            raise ConfigError(f"{option}: {name} has no section `environments`; name a file that has one, or the "
                              "environment itself, as file.py:name")
    elif ":" in name:
        said = name.rpartition(":")[2]
        values = {said if re.fullmatch("[A-Za-z0-9_-]+", said) else "environment": {"path": name,
                                                                                  "max_tokens": MAX_TOKENS}}
    else:
        raise ConfigError(f"{option}={name!r} is no environment; write file.py:name or module:name, or name a .yaml "
                          "file with a section `environments`")
    if max_turns is not None and isinstance(values, dict):
        values = {key: {**value, "max_turns": max_turns} if isinstance(value, dict) else value
                  for key, value in values.items()}
    environments: dict[str, EnvironmentConfig] = read_section(
        dict[str, EnvironmentConfig], values, f"{option} {name}: the section `environments` is not valid")
    return environments
