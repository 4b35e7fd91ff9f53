"""Takes a stage's command-line arguments apart: the configuration file, and overrides."""

from pathlib import Path

from rlhf_ray.errors import ConfigError


def split_arguments(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """The CONFIG among `arguments`, wherever it stands, and the overrides (`--a.b=c`, or `--a.b` and `c`).

    Raises:
        ConfigError: more than one configuration file.
    """
    files: list[str] = []
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            files.append(argument)
            continue
        overrides.append(argument)
        if "=" not in argument and rest and not rest[0].startswith("--"):
            overrides.append(rest.pop(0))
    if len(files) > 1:
        if fields := [file for file in files if "=" in file]:
            raise ConfigError(f"unexpected argument {fields[0]!r}; a field is changed by --{fields[0]}")
        raise ConfigError(f"one configuration file at a time; got {' and '.join(files)}")
    return (Path(files[0]) if files else None), overrides
