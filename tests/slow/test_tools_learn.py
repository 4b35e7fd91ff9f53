"""The tools example: rewards of episodes teach what the demonstrations got wrong, and nothing once they say nothing."""

import json

import pytest

from rlhf_ray.stages import tools_example
from tests.slow.conftest import SEEDS
from tests.slow.permuted import permute_rewards

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", SEEDS)
def test_held_out_questions_come_out_right(seed, tmp_path):
    summary = tools_example.run(tmp_path, "grpo", seed, [])
    assert 0.05 <= summary["success_before"] < 0.3, "it imitates demonstrations of which one in seven is right"
    assert summary["success_after"] >= 0.8
    assert summary["turns_mean"] >= 4 and summary["tool_calls"] >= 3
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_an_agent_with_openais_client_ends_with_the_same_weights(tmp_path):
    """The same tools in an agent's own loop, through the gateway: four steps and their evaluations."""
    native = tools_example.run(tmp_path, "grpo", 0, ["--run.steps=4"])
    agent = tools_example.run(tmp_path, "grpo", 0, ["--run.steps=4"], agent=True)
    assert agent["success_after"] == native["success_after"]
    weights = [(tmp_path / run / "model/model.safetensors").read_bytes() for run in ("grpo", "agent")]
    assert weights[0] == weights[1]
    metrics = [[json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
               for run in ("grpo", "agent")]
    for mine, its in zip(*metrics, strict=True):
        same = [name for name in mine
                if name.startswith(("policy/", "reward/", "kl/", "eval/solved", "episodes/turns"))]
        assert {name: its[name] for name in same} == {name: mine[name] for name in same}


def test_permuted_rewards_teach_nothing(tmp_path, monkeypatch):
    permute_rewards(monkeypatch)
    summary = tools_example.run(tmp_path, "grpo", 0, [])
    assert summary["success_after"] < 0.3
