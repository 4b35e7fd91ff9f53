"""Whole quickstarts, one per seed and family, shared by the slow tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_ray.config.model import Family
from rlhf_ray.stages import quickstart

SEEDS = (0, 1, 2)


@pytest.fixture(scope="session")
def finished_quickstart(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, dict[str, Any]]]:
    """finished_quickstart(seed, family) -> directory and summary of the quickstart, run when first asked for."""
    root = tmp_path_factory.mktemp("quickstarts")

    def get(seed: int, family: Family = "llama") -> tuple[Path, dict[str, Any]]:
        directory = root / f"{family}-{seed}"
        if not (directory / "summary.json").is_file():
            quickstart.run(directory, seed, [], family)
        return directory, json.loads((directory / "summary.json").read_text())

    return get
