"""What other systems have as environments, in the shapes that are recognised here (`environments.shapes`): a module for
each source of `config.environment_sources`, imported in the process of the environment only.

A module NAME has `make(settings) -> brought`: from the source's fields, what a user could have brought by `path`.
"""

import importlib
from typing import Any

from rlhf_ray.user_code.loading import load


def brought(source: str, settings: Any) -> Any:
    """What a source is: tools, a class or an agent.

    Args:
        source: name of the field of an environment, as in `EnvironmentConfig.source`.

    Raises whatever the user's code, or the library of the source, raises when it is imported.
    """
    if source == "path":
        return load(settings)
    return importlib.import_module(f"rlhf_ray.environments.adapters.{source}").make(settings)
