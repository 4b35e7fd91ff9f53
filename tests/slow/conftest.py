"""Whole quickstarts, one per seed, shared by the slow tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_ray.stages import quickstart

SEEDS = (0, 1, 2)


@pytest.fixture(scope="session")
def finished_quickstart(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, dict[str, Any]]]:
    """Directory and summary of the quickstart of a seed, run when first asked for."""
    root = tmp_path_factory.mktemp("quickstarts")

    def get(seed: int) -> tuple[Path, dict[str, Any]]:
        directory = root / str(seed)
        if not (directory / "summary.json").is_file():
            quickstart.run(directory, seed, [])
        return directory, json.loads((directory / "summary.json").read_text())

    return get
