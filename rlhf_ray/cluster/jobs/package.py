"""The files that a job takes along: the working directory without large or generated files, and this package.

Ray packs them into one archive, which lies in the memory of the cluster's control service and is unpacked on every node
that runs a part of the job. So the archive is for code, configurations and small data; models and large data belong
where all nodes see them.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import rlhf_ray
from rlhf_ray.config.fields import strings_of
from rlhf_ray.errors import ConfigError
from rlhf_ray.internals.ray import largest_package, packed_files

EXCLUDES = ("/runs/", ".git/", ".venv/", "venv/", "node_modules/", "__pycache__/", "*.egg-info/", ".pytest_cache/",
            ".mypy_cache/", ".ruff_cache/", ".hypothesis/", "wandb/", "mlruns/", ".ray/")
"""Left out in addition to the patterns of the directory's .gitignore and .rayignore; same syntax."""
MIB = 2**20
OFTEN_INSTALLED = ("tests", "examples")
"""Directories that packages install by mistake; nothing imports those."""


@dataclass(frozen=True)
class Package:
    """The files of a directory that a job takes along."""

    directory: Path
    files: Mapping[str, int]
    """Bytes by path relative to the directory."""

    @property
    def nbytes(self) -> int:
        """Size before compression."""
        return sum(self.files.values())

    def holds(self, path: Path) -> bool:
        """Whether it contains a file, or any file of a directory."""
        try:
            name = path.resolve().relative_to(self.directory).as_posix()
        except ValueError:
            return False
        return name in self.files or any(file.startswith(f"{name}/") for file in self.files)

    def largest(self, count: int = 5) -> str:
        """Its largest files, in words."""
        order = sorted(self.files.items(), key=lambda item: -item[1])[:count]
        return ", ".join(f"{name} ({size / MIB:.3g} MiB)" for name, size in order)


def list_package(directory: Path) -> Package:
    """The files that Ray would pack of `directory`, by Ray's own walk.

    Raises:
        ConfigError: it is not a directory, or is larger than Ray's limit.
    """
    directory = directory.resolve()
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory: name the directory that the job runs in")
    package = Package(directory, {path.relative_to(directory).as_posix(): path.stat().st_size
                                  for path in packed_files(directory, EXCLUDES)})
    if package.nbytes > (limit := largest_package()):
        raise ConfigError(
            f"the working directory {directory} has {package.nbytes / MIB:,.0f} MiB to pack, and Ray takes at most "
            f"{limit / MIB:.0f} MiB: the archive is held in the head's memory and copied to every node. Its "
            f"largest files: {package.largest()}. List what the run does not need in .rayignore (patterns as in "
            ".gitignore), and put data and models where all nodes see them")
    return package


def check_paths(config: BaseModel, package: Package) -> None:
    """Refuse relative paths of the configuration that the job would not find in its working directory.

    Raises:
        ConfigError: naming the field, and what to do.
    """
    for field, text in strings_of(config):
        # reward functions are "file.py:name"
        path = Path(text.rpartition(":")[0] if ".py:" in text else text)
        if path.is_absolute() or not exists_here(package.directory / path) or package.holds(package.directory / path):
            continue
        if field in ("run.dir", "run.upload") or text in ("", "."):
            continue
        raise ConfigError(
            f"{field}={text!r} is not packed (left out are runs/, environments, and what .gitignore and .rayignore "
            "name), so the job would not find it: give an absolute path that all nodes of the cluster see, or the name "
            "of a model on the Hub")


def check_module_names(package: Package) -> None:
    """Refuse modules that the job's processes would import in place of installed ones: Ray puts the working directory
    before the standard library.

    Raises:
        ConfigError: naming the file.
    """
    elsewhere = [path for path in sys.path if Path(path).resolve() != package.directory]
    for file in sorted(package.files):
        name, _, rest = file.partition("/")
        if rest not in ("", "__init__.py") or (not rest and not name.endswith(".py")) or name in OFTEN_INSTALLED:
            continue
        name = name.removesuffix(".py")
        other = PathFinder.find_spec(name, elsewhere)
        installed = other is not None and other.origin is not None and not other.origin.startswith(
            f"{package.directory}/")
        if name in sys.stdlib_module_names or installed:
            raise ConfigError(f"{package.directory / file} is named like an installed module, and Ray's processes and "
                              f"workers would import it in place of that: rename it, or name it in .rayignore")


def exists_here(path: Path) -> bool:
    """Whether this user sees that a path exists; a text that can be no path, or one below a directory that may not be
    entered, does not."""
    try:
        return path.exists()
    except OSError:
        return False


def environment_of(package: Package, variables: Mapping[str, str], requirements: Sequence[str]) -> dict[str, Any]:
    """Ray's runtime environment of a job: the directory, this package, variables, and requirements to install."""
    home = Path(rlhf_ray.__file__).resolve().parent
    environment: dict[str, Any] = {"working_dir": str(package.directory), "excludes": list(EXCLUDES),
                                   "env_vars": dict(variables)}
    if not package.holds(home):
        environment["py_modules"] = [str(home)]
    if requirements:
        environment["pip"] = list(requirements)
    return environment
