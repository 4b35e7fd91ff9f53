"""The adapter of docs/coming_from.md with the real skyrl-gym, whose GSM8K environment judges an answer. Skipped where
the package cannot be downloaded."""

import asyncio
import subprocess
import sys

import pytest

from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.environments.pool import EnvironmentPool
from rlhf_ray.environments.protocol import Reply
from tests.pages import ROOT, fences

pytestmark = pytest.mark.slow
PACKAGES = ["skyrl-gym==0.4.0", "func_timeout", "omegaconf", "antlr4-python3-runtime==4.9.3"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path, *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"skyrl-gym cannot be installed here: {done.stderr[-300:]}")
    (adapter,) = [each for each in fences(ROOT / "docs/coming_from.md") if each.file == "skyrl_env.py"]
    (tmp_path / adapter.file).write_text(adapter.text)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("answer", "reward"), [("It is #### 42", 1.0), ("It is #### 41", 0.0)])
def test_an_environment_of_skyrl_gym_judges(here, answer, reward):
    async def run():
        pool = EnvironmentPool("skyrl", EnvironmentConfig(path="skyrl_env.py:Skyrl"))
        row = {"prompt": "6 * 7?", "env_class": "gsm8k", "reward_spec": {"ground_truth": "42"}}
        try:
            await pool.start()
            environment = await pool.open(row, seed=1)
            return await environment.step(Reply(answer, content=answer))
        finally:
            await pool.stop()

    step = asyncio.run(run())
    assert step.done and step.reward == reward
