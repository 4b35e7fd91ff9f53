"""Configurations that come with the package, below configs/, and how a recipe of several stages runs.

A recipe is a folder of ordinary stage configurations whose paths all lie below one home directory, `runs/NAME`.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlhf_ray.config.fields import strings_of
from rlhf_ray.config.load import STAGES, load
from rlhf_ray.errors import ConfigError
from rlhf_ray.observability.run_directory import RunDirectory, read_json


@dataclass(frozen=True)
class Recipe:
    """One folder of configurations."""

    name: str
    """Below configs/, such as "quickstart"."""
    home: str
    """The directory of all paths in the configurations."""

    def folder(self) -> Path:
        """The folder: beside the package in a checkout, below share/ in an installation.

        Raises:
            ConfigError: it is in neither place.
        """
        below = Path("configs") / self.name
        places = (Path(__file__).parents[2] / below, Path(sys.prefix) / "share" / "rlhf-ray" / below)
        for place in places:
            if place.is_dir():
                return place
        raise ConfigError(f"the configurations of {self.name} are missing; looked in {places[0]} and {places[1]}")

    def config(self, stage: str, directory: Path, seed: int, overrides: list[str] | None = None,
               file: str | None = None) -> Any:
        """A stage's configuration with its paths below `directory` instead of `home`; `overrides` are applied last.

        Args:
            file: name of the YAML file when it is not the stage's.
        """
        path = self.folder() / f"{file or stage.replace('-', '_')}.yaml"
        moved = [f"--{field}={text.replace(self.home, str(directory), 1)}"
                 for field, text in strings_of(load(STAGES[stage], path, [])) if text.startswith(self.home)]
        return load(STAGES[stage], path, [*moved, f"--run.seed={seed}", *(overrides or [])])


def refuse_other_start(directory: Path, seed: int, family: str = "llama") -> None:
    """Refuse to continue a recipe with another seed or family of models than it was started with.

    Raises:
        ConfigError: the SFT stage below `directory` has others.
    """
    begun = directory / "sft" / "config.yaml"
    if not begun.is_file():
        return
    values = yaml.safe_load(begun.read_text())
    started = {"seed": values["run"]["seed"], "family": values["model"]["architecture"]["family"]}
    for option, given in (("seed", seed), ("family", family)):
        if (other := started[option]) != given:
            raise ConfigError(f"{directory} was started with --{option} {other}, not {given}; pass --{option} {other} "
                              "to continue it, or another --dir to start a new one")


def run_once(name: str, work: Callable[[], Any], directory: Path) -> float:
    """Run a stage unless its summary says that it finished; returns the seconds it took, now or earlier.

    A stage that was interrupted continues from its checkpoint, if `work` resumes.
    """
    run = RunDirectory(directory)
    if run.finished_well():
        print(f"{name}: finished before, in {directory}")
        return float(read_json(run.summary)["seconds"])
    return timed(work)


def timed(work: Callable[[], Any]) -> float:
    """Seconds that `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
