"""Installed libraries and their bounds in pyproject.toml against the versions whose internals were read."""

import sys
import tomllib
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
MODULES = [path.stem for path in sorted((Path(__file__).parents[3] / "rlhf_ray/internals").glob("[a-z]*.py"))]
LIBRARIES = [name for name in MODULES if name not in sys.stdlib_module_names]
"""What belongs to Python itself has no version of its own, and is tested with each Python."""


def read_from(library: str) -> Version:
    return Version(import_module(f"rlhf_ray.internals.{library}").VERSION)


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_installed_library_is_the_one_that_was_read(library):
    try:
        installed = Version(version(library))
    except PackageNotFoundError:
        installed = Version(version(f"{library}-cpu"))
    assert installed.release[:2] == read_from(library).release[:2], (
        f"{library} {installed}: read rlhf_ray/internals/{library}.py against its sources, then change VERSION")


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_requirement_admits_the_version_that_was_read_and_no_later_minor_version(library):
    extras = PROJECT["optional-dependencies"]
    texts = PROJECT["dependencies"] + extras["cpu"] + extras["gpu"]
    bounds = [r.specifier for r in map(Requirement, texts) if r.name in (library, f"{library}-cpu")]
    read = read_from(library)
    later = Version(f"{read.major}.{read.minor + 1}.0")
    assert bounds and all(read in bound and later not in bound for bound in bounds), bounds
