"""The token of a reward service: read where it is used, held as a secret, never part of the configuration."""

import os
from pathlib import Path

from pydantic import SecretStr

from rlhf_ray.config.rewards import HTTPReward
from rlhf_ray.errors import ConfigError


def read_token(name: str, config: HTTPReward) -> SecretStr | None:
    """The token from the file or environment variable that the configuration names; None when it names neither.

    Raises:
        ConfigError: there is nothing there, or it cannot stand in a header.
    """
    if config.token_file is not None:
        where = f"rewards.{name}.token_file={config.token_file!r}"
        try:
            token = Path(config.token_file).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
            raise ConfigError(f"{where} cannot be read: {reason}") from None
    elif config.token_variable is not None:
        where = f"rewards.{name}.token_variable={config.token_variable!r}"
        token = os.environ.get(config.token_variable, "").strip()
    else:
        return None
    if not token:
        raise ConfigError(f"{where} holds no token; put it there (on every node where reward scorers run)")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{where} holds more than a token: one word of printable ASCII is needed")
    return SecretStr(token)
