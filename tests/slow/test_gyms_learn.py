"""The examples of gymnasium and reasoning-gym: rewards of their environments teach what the demonstrations lack, and
nothing is learned where no update changes the policy."""

import importlib

import pytest

pytestmark = pytest.mark.slow
LEAST_AFTER = {"frozen_lake": ("gymnasium", 0.9), "reasoning_gym": ("reasoning_gym", 0.8)}
"""Example -> its library, and the success that is reached."""


@pytest.mark.parametrize("name", LEAST_AFTER)
def test_success_rises_by_rewards_and_only_by_updates(name, tmp_path):
    library, least = LEAST_AFTER[name]
    pytest.importorskip(library, reason=f"needs the extra: pip install 'rlhf-ray[{library.replace('_', '-')}]'")
    run = importlib.import_module(f"rlhf_ray.stages.{name}_example").run
    learned = run(tmp_path, "grpo", 0, [])
    assert 0.05 < learned["success_before"] < 0.6
    assert learned["success_after"] >= least
    still = run(tmp_path, "grpo", 0, [f"--run.dir={tmp_path}/control", "--policy.optimizer.learning_rate=1e-30"])
    assert still["success_before"] == still["success_after"] == learned["success_before"]
