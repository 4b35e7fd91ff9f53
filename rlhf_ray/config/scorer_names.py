"""Scorers by name: what `--scorer`, `--reward`, `logging.judge` and `pairs.judge` accept."""

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rlhf_ray.config.config_layers import read_yaml
from rlhf_ray.config.paths import expand_path
from rlhf_ray.config.rewards import RewardConfig
from rlhf_ray.errors import ConfigError

YAML = (".yaml", ".yml")
WITHOUT_FIELDS = ("vader", "exact_match", "number")
"""Reward types that need no field; the last two compare with the column `answer`."""
KNOWN = ("vader, a reward model (directory or Hub name), exact_match or number (compare with the column `answer`), "
         "file.py:function, the http address of a reward service, or a .yaml file with a `rewards` section")


def scorer_rewards(name: str, option: str = "--scorer") -> dict[str, RewardConfig]:
    """The reward components of the scorer called `name` (see `KNOWN`); files other than YAML are not opened.

    Args:
        option: the option or field with the name, for messages.

    Raises:
        ConfigError: it is not a valid scorer.
    """
    try:
        name = expand_path(name)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    if name in WITHOUT_FIELDS:
        return _parsed({name: {"type": name}}, f"{option} {name}")
    if name.startswith(("http://", "https://")):
        return _parsed({"http": {"type": "http", "urls": [name]}}, f"{option} {name}")
    if Path(name).suffix in YAML:
        return _parsed(_section(Path(name), option), name)
    if ":" in name:
        return _parsed({"function": {"type": "function", "function": name}}, f"{option} {name}")
    return _parsed({"model": {"type": "model", "path": name}}, f"{option} {name}")


def _section(file: Path, option: str) -> Any:
    """The `rewards` section of a YAML file, or the whole file when it is nothing else."""
    if not file.is_file():
        raise ConfigError(f"{option}: {file} does not exist; name one of: {KNOWN}")
    values = read_yaml(file).values
    return values.get("rewards", values)


def _parsed(values: Any, source: str) -> dict[str, RewardConfig]:
    return read_section(dict[str, RewardConfig], values, f"{source} is not a valid rewards section")


def read_section(kind: Any, values: Any, refusal: str) -> Any:
    """A section of a file that is no whole configuration.

    Args:
        kind: its type.
        refusal: begins the message.

    Raises:
        ConfigError: it is not of this type; names all fields that are wrong.
    """
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"{refusal}: {wrong}") from None
