"""The configurations on docs/gpu.md are such as load, and their weights travel as the page says."""

import re
from pathlib import Path

import pytest
import yaml

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig

PAGE = Path(__file__).parents[3] / "docs" / "gpu.md"
BLOCKS = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.S)]


@pytest.mark.parametrize(("number", "transport"), [(0, "nccl"), (1, "ipc")])
def test_it_loads_as_it_stands(write, number, transport):
    config = load(PPOConfig, write("ppo", **BLOCKS[number]), [])
    assert config.weights.transport == transport
    assert bool(config.generator.sleep_level) == config.policy.offload_between_phases == (number == 1)


def test_those_are_all():
    assert len(BLOCKS) == 2
