"""What of this machine a job takes along: the working directory without what is large or made here, and this package.

Ray packs it into one archive that lies in the memory of the cluster's control service and is unpacked on every node
that runs a part of the job. So it is for code, configurations and small data; models and large data lie where all
nodes see them.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from ray._private.runtime_env.packaging import GCS_STORAGE_MAX_SIZE, _dir_travel, _get_excludes

import rlhf_ray
from rlhf_ray.errors import ConfigError

EXCLUDES = ("/runs/", ".git/", ".venv/", "venv/", "node_modules/", "__pycache__/", "*.egg-info/", ".pytest_cache/",
            ".mypy_cache/", ".ruff_cache/", ".hypothesis/", "wandb/", "mlruns/", ".ray/")
"""Left out besides what .gitignore and .rayignore of the directory name; patterns as there."""
LIMIT = int(GCS_STORAGE_MAX_SIZE)
"""Bytes: more than a message to Ray's control service may have."""
MIB = 2**20


@dataclass(frozen=True)
class Package:
    """The files of a directory that a job takes along."""

    directory: Path
    files: Mapping[str, int]
    """Bytes by path relative to the directory."""

    @property
    def nbytes(self) -> int:
        """Before compression."""
        return sum(self.files.values())

    def holds(self, path: Path) -> bool:
        """Whether a file, or something of a directory, is in it."""
        try:
            name = path.resolve().relative_to(self.directory).as_posix()
        except ValueError:
            return False
        return name in self.files or any(file.startswith(f"{name}/") for file in self.files)

    def largest(self, count: int = 5) -> str:
        """Its largest files, in words."""
        order = sorted(self.files.items(), key=lambda item: -item[1])[:count]
        return ", ".join(f"{name} ({size / MIB:.3g} MiB)" for name, size in order)


def look_into(directory: Path) -> Package:
    """What Ray would pack of `directory`, by Ray's own walk.

    Raises:
        ConfigError: it is no directory, or more than Ray takes.
    """
    directory = directory.resolve()
    if not directory.is_dir():
        raise ConfigError(f"{directory} is no directory")
    files: dict[str, int] = {}

    def take(path: Path) -> None:
        if path.is_file():
            files[path.relative_to(directory).as_posix()] = path.stat().st_size

    _dir_travel(directory, [_get_excludes(directory, list(EXCLUDES))], take, include_gitignore=True,
                logger=logging.getLogger(__name__))  # Ray's own would name .gitignore as what is left out
    package = Package(directory, files)
    if package.nbytes > LIMIT:
        raise ConfigError(
            f"the working directory {directory} has {package.nbytes / MIB:,.0f} MiB to take along, and Ray takes at "
            f"most {LIMIT / MIB:.0f} MiB: it goes through the memory of the cluster's head, and to every node. Its "
            f"largest files: {package.largest()}. Name what the run does not need in a file .rayignore (patterns as in "
            ".gitignore), and put data and models where all nodes see them")
    return package


def check_paths(config: BaseModel, package: Package) -> None:
    """Refuse what the configuration names by a relative path and the job would not find in its working directory.

    Raises:
        ConfigError: naming the field, and what to do.
    """
    for field, text in strings_of(config):
        # reward functions are "file.py:name"
        path = Path(text.rpartition(":")[0] if ".py:" in text else text)
        if path.is_absolute() or not (package.directory / path).exists() or package.holds(package.directory / path):
            continue
        if field in ("run.dir", "run.upload") or text in ("", "."):
            continue
        raise ConfigError(
            f"{field}={text!r} is not packed (left out are runs/, environments, and what .gitignore and .rayignore "
            "name), so the job would not find it: give an absolute path that all nodes of the cluster see, or the name "
            "of a model on the Hub")


def strings_of(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """All texts of a configuration with the dotted names of their fields."""
    if isinstance(value, BaseModel):
        for key in type(value).model_fields:
            yield from strings_of(getattr(value, key), f"{name}.{key}".lstrip("."))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_of(item, f"{name}.{key}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings_of(item, name)
    elif isinstance(value, str):
        yield name, value


def environment_of(package: Package, variables: Mapping[str, str], requirements: Sequence[str]) -> dict[str, Any]:
    """Ray's runtime environment of a job: the directory, this very package, variables, and requirements to install."""
    home = Path(rlhf_ray.__file__).resolve().parent
    environment: dict[str, Any] = {"working_dir": str(package.directory), "excludes": list(EXCLUDES),
                                   "env_vars": dict(variables)}
    if not package.holds(home):
        environment["py_modules"] = [str(home)]
    if requirements:
        environment["pip"] = list(requirements)
    return environment
