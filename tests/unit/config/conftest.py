"""A configuration file of each stage with only what is required, and an environment without our variables."""

import os
from pathlib import Path

import pytest
import yaml

MINIMAL = {
    "sft": {"model": {"path": "m"}, "data": {"path": "d.jsonl"}},
    "reward-model": {"model": {"path": "m"}, "data": {"path": "d.jsonl"}},
    "process-reward": {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "steps": {"placeholder": "?"}},
    "preferences": {"model": {"path": "m"}, "prompts": {"path": "p.jsonl"}},
    "ppo": {"model": {"path": "m"}, "rewards": {"main": {"type": "model", "path": "r"}},
            "prompts": {"path": "p.jsonl"}},
}
"""Of the stages; `grpo`, `rloo` and `reinforce` take a file of `ppo`."""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.upper().startswith("RLHF_RAY_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def write(tmp_path):
    """write("ppo", run={...}) -> path of a minimal file with these sections put in."""

    def _write(command: str, **sections) -> Path:
        path = tmp_path / f"{command}.yaml"
        path.write_text(yaml.safe_dump(MINIMAL[command] | sections, sort_keys=False))
        return path

    return _write
