"""The examples of gymnasium and reasoning-gym: rewards of their environments teach what the demonstrations lack, and
nothing once they say nothing."""

import importlib

import pytest

from tests.slow.permuted import permute_rewards

pytestmark = pytest.mark.slow
SUCCESS = {"frozen_lake": ("gymnasium", 0.9), "reasoning_gym": ("reasoning_gym", 0.8)}
"""Example -> its library, and the success that is reached at least."""


@pytest.mark.parametrize("name", SUCCESS)
def test_success_rises_by_rewards_and_not_by_permuted_ones(name, tmp_path, monkeypatch):
    library, least = SUCCESS[name]
    pytest.importorskip(library, reason=f"needs the extra: pip install 'rlhf-ray[{library.replace('_', '-')}]'")
    run = importlib.import_module(f"rlhf_ray.stages.{name}_example").run
    learned = run(tmp_path, "grpo", 0, [])
    assert 0.05 < learned["success_before"] < 0.6
    assert learned["success_after"] >= least
    permute_rewards(monkeypatch)
    control = run(tmp_path, "grpo", 0, [f"--run.dir={tmp_path}/control"])
    assert control["success_before"] == learned["success_before"]
    assert control["success_after"] < (control["success_before"] + least) / 2
    print(name, learned, control)
