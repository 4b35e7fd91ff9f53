"""The tools example: rewards of episodes teach what the demonstrations got wrong."""

import json

import pytest

from rlhf_ray.stages import tools_example
from tests.slow.conftest import SEEDS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", SEEDS)
def test_held_out_questions_come_out_right(seed, tmp_path):
    summary = tools_example.run(tmp_path, "grpo", seed, [])
    assert 0.05 <= summary["success_before"] < 0.3, "it imitates demonstrations of which one in seven is right"
    assert summary["success_after"] >= 0.8
    assert summary["turns_mean"] >= 4 and summary["tool_calls"] >= 3
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
