"""Arguments that several commands take: a stage's configuration file and overrides, a run's directory."""

from pathlib import Path

from rlhf_ray.errors import ConfigError, DataError


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


def require_run(run: Path) -> None:
    """Refuse a RUN that is no directory.

    Raises:
        DataError: naming it.
    """
    if not run.is_dir():
        raise DataError(f"there is no run directory {run}; name the one that a stage wrote (its run.dir)")
