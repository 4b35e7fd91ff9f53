"""The adapters of docs/coming_from.md bring what other systems have, whose shapes are written here as they are in the
files named; and the example configurations of other sources can run."""

import asyncio

import pytest

from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.environments.pool import EnvironmentPool
from rlhf_ray.environments.protocol import Reply
from tests.pages import ROOT, fences

SKYRL = '''
class Doubles:
    """As SearchEnv of skyrl-gym 0.4.0 (skyrl_gym/envs/search/env.py): text in, messages and a dict out."""

    def __init__(self, env_config, extras={}):
        self.number, self.turns, self.max_turns = extras["reward_spec"]["ground_truth"], 0, extras["max_turns"]

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        self.turns += 1
        if "<answer>" in action or self.turns >= self.max_turns:
            return {"observations": [], "reward": float(str(2 * self.number) in action), "done": True, "metadata": {}}
        found = [{"role": "user", "content": f"it is {self.number}"}] if "<look>" in action else []
        return {"observations": found, "reward": 0, "done": False, "metadata": {"looked": len(found)}}

    def close(self):
        print("closed")


def make(name, **kwargs):
    """As skyrl_gym.make (skyrl_gym/envs/registration.py)."""
    return {"doubles": Doubles}[name](**kwargs)
'''
OPENRLHF = '''
from abc import ABC, abstractmethod

import numpy


class AgentInstanceBase(ABC):
    """As in openrlhf 0.11.0 (openrlhf/utils/agent.py)."""

    @abstractmethod
    def __init__(self, *args, **kwargs):
        pass

    async def reset(self, states: dict, **kwargs):
        return states

    @abstractmethod
    async def step(self, state_dict: dict, **kwargs):
        raise NotImplementedError


class AgentInstance(AgentInstanceBase):
    """As examples/python/agent_func.py: rewards are tensors of one number."""

    def __init__(self, *args, **kwargs):
        self.step_idx = 0

    async def step(self, states, **kwargs):
        self.step_idx += 1
        right = states["label"] in states["action_text"]
        return {"rewards": numpy.array(float(right)), "scores": numpy.array(float(right)), "done": right,
                "environment_feedback": f"no, after {len(states['observation_text'])} characters",
                "sampling_params": states.get("sampling_params"), "extra_logs": {"steps": numpy.array(self.step_idx)}}
'''


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with the files of the page, and modules of the systems' shapes."""
    for fence in fences(ROOT / "docs/coming_from.md"):
        if fence.file:
            (tmp_path / fence.file).write_text(fence.text)
    (tmp_path / "skyrl_gym.py").write_text(SKYRL)
    (tmp_path / "agent_func.py").write_text(OPENRLHF)
    monkeypatch.chdir(tmp_path)


def play(path, row, *texts):
    """How an environment begins, and its answers to these replies."""
    async def run():
        pool = EnvironmentPool("brought", EnvironmentConfig(path=path))
        try:
            await pool.start()
            environment = await pool.open(row, seed=5)
            return environment.start.messages, [await environment.step(Reply(text, content=text)) for text in texts]
        finally:
            await pool.stop()

    return asyncio.run(run())


def test_an_environment_of_skyrl_gym_is_played(here):
    row = {"prompt": "Double it.", "env_class": "doubles", "reward_spec": {"ground_truth": 21}, "max_turns": 5}
    start, steps = play("skyrl_env.py:Skyrl", row, "<look>", "hm", "<answer>42</answer>")
    assert start == [{"role": "user", "content": "Double it."}]
    assert [step.messages for step in steps[:2]] == [[{"role": "user", "content": "it is 21"}],
                                                     [{"role": "user", "content": ""}]]
    assert [(step.reward, step.done) for step in steps] == [(0.0, False), (0.0, False), (1.0, True)]
    assert steps[0].info == {"looked": 1.0}


def test_an_agent_of_openrlhf_is_played(here):
    start, steps = play("openrlhf_env.py:OpenRLHF", {"prompt": "6 * 7?", "label": "42"}, "41", "42")
    assert start == [{"role": "user", "content": "6 * 7?"}]
    assert steps[0].messages == [{"role": "user", "content": "no, after 6 characters"}]
    assert [(step.reward, step.done, step.info) for step in steps] == [
        (0.0, False, {"steps": 1.0}), (1.0, True, {"steps": 2.0})]


@pytest.mark.parametrize("name", ["mcp", "openenv", "nemo_gym"])
def test_an_example_configuration_can_run(name):
    (environment,) = load(PPOConfig, ROOT / f"configs/examples/adapters/{name}.yaml", []).environments.values()
    assert environment.source[0] == name
