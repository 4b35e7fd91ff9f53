"""Samples of agents are compared with what the agents received. The rows are those of real agents, the real gateway and
the real runner; only the policy is made up."""

import asyncio
import json
from collections import Counter

import numpy as np
import pytest

from chaos.episode_runs import agent_sections, make_episode_files
from chaos.injection_log import INJECTION_LOG
from chaos.witness.agents import agent_problems
from chaos.witness.episodes import EpisodeOrder
from chaos.witness.journals import JOURNALS, read_environments
from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.records import Prompts, SampleKey
from rlhf_ray.roles.episode_runner import EpisodeRunner
from tests.unit.chaos.witness.test_episodes import Policy

SAMPLES = 2


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """(rollout of two samples of each row, order, lines of the agents)."""
    root = tmp_path_factory.mktemp("agents")
    files = make_episode_files(root)
    rows = [json.loads(line) for line in files.agent_prompts.read_text().splitlines()]
    sections = agent_sections(files)
    texts = [row.pop("prompt") for row in rows]
    prompts = Prompts(np.arange(len(rows) + 1), np.zeros(len(rows), np.int32), texts, rows, np.arange(len(rows)))
    keys = [SampleKey(0, row, sample) for row in range(len(rows)) for sample in range(SAMPLES)]

    async def play():
        environments = {name: EnvironmentConfig(**given) for name, given in sections["environments"].items()}
        runner = EpisodeRunner(environments, ModelConfig(path=str(files.model)),
                               SamplingConfig(**sections["generator"]["sampling"]), Policy(files.stops), least_scored=0)
        await runner.start()
        try:
            return await runner.play(prompts, keys, 5)
        finally:
            await runner.stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(JOURNALS, str(root / "journals"))
        patch.delenv(INJECTION_LOG, raising=False)
        rollout = asyncio.run(play())
    lines = read_environments(root / "journals")
    order = EpisodeOrder.of(files.agent_prompts, 5, files.model, lines, sections["environments"])
    return rollout, order, lines


def tokens_of(rollout):
    return [tuple(rollout.row(i, "tokens").tolist()) for i in range(len(rollout))]


def test_the_episodes_are_of_the_kinds_that_are_meant(played):
    rollout, _, lines = played
    assert {episode.cause for episode in rollout.episodes} == {"completed"}, [e.error for e in rollout.episodes]
    assert {episode.environment for episode in rollout.episodes} == {"asker", "client", "program"}
    assert max(Counter(rollout.samples.tolist()).values()) >= 3, "some begin several segments"
    assert any(turn.tool_calls for episode in rollout.episodes for turn in episode.turns[:-1]), "tools are called"
    assert len({line["session"] for line in lines if "session" in line}) == len(rollout.keys)


def test_the_rows_of_a_rollout_are_its_samples_and_what_agents_received(played):
    rollout, order, lines = played
    found = order.samples_in(Counter(tokens_of(rollout)))
    assert found.whole == dict.fromkeys(range(len(rollout.keys) // SAMPLES), SAMPLES)
    assert not found.again and not found.partial
    rows = set(range(len(rollout.keys) // SAMPLES))
    assert list(agent_problems(lines, rows, found.turns)) == []
