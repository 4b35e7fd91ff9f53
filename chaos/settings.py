"""The runs that meet faults: tiny models, two generators and two ranks of each learner, in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from chaos.nodes import sections as scattered
from chaos.service import Service
from tests.cluster.tiny import Files, make_files, ppo_settings

LEASE_S, SAVED_EVERY = 5.0, 3
SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "cluster": {"heartbeat_timeout_s": LEASE_S, "max_restarts": 5, "max_rebuilds": 5},
    "logging": {"tensorboard": False, "samples_per_step": 0},
    "checkpoint": {"every": SAVED_EVERY, "keep": 2},
    "evaluation": {"limit": 2},
    "reward": {"on_failure": "quarantine", "quarantine_limit": 0.2},
}
"""What differs from the runs of the tests."""
SERVICE = {"type": "http", "weight": 0.01, "send": "tokens", "request_timeout_s": 2.0, "timeout_s": 60.0}
"""A small part of the reward: the service scores by prompt alone. It takes longer than a request may where it is slow.
"""
RANKS = {"generator": 2, "policy_learner": 2, "critic_learner": 2}
"""Workers of the roles that have several."""


@dataclass(frozen=True)
class Ground:
    """A directory with the models and prompts that runs start from."""

    root: Path
    files: Files
    service: Service
    """Gives part of the rewards."""

    @classmethod
    def make(cls, root: Path, service: Service) -> Ground:
        """Make models and prompts; some seconds."""
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        root.mkdir(parents=True, exist_ok=True)
        return cls(root, make_files(root), service)

    def configure(self, name: str, steps: int, max_staleness: int, several_nodes: bool = False) -> tuple[Path, Path]:
        """Write the configuration of a run; returns it and the directory that the run will write."""
        directory = self.root / name
        settings = ppo_settings(self.files, directory)
        for sections in (SECTIONS, scattered(RANKS["generator"]) if several_nodes else {}):
            for section, fields in sections.items():
                settings[section] = {**settings.get(section, {}), **fields}
        settings["run"]["steps"] = steps
        settings["rewards"]["service"] = {**SERVICE, "urls": [self.service.url]}
        settings["coordinator"]["max_staleness"] = max_staleness
        path = self.root / f"{name}.yaml"
        path.write_text(yaml.safe_dump(settings))
        return path, directory
