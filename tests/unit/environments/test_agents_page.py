"""The agents of docs/agents.md do what the page says, through a real gateway and by the clients that they use; the
policy's turns are by script, and a token is a character. `tests/slow/test_pages.py` runs the page's commands."""

import asyncio
import shutil

import pytest
import yaml

from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.config.load import load
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.environments.tool_calls import ToolCallParser
from rlhf_ray.roles.episode import TextTools
from rlhf_ray.roles.episode_runner import EpisodeRunner
from tests.pages import ROOT, fences, write_files
from tests.unit.roles import agent_plays as plays

PAGE = ROOT / "docs/agents.md"
ROW = {"price": 3}
CALL = '{"name": "look_up", "arguments": {"item": "%s"}}'


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with the files of the page."""
    write_files(PAGE, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def play(*texts, **settings):
    """(rows as text, the episode) of an agent, with these turns of the policy."""
    config = EnvironmentConfig(**settings)
    runner = EpisodeRunner({"shop": config}, ModelConfig(path="m"), SamplingConfig(max_tokens=200),
                           plays.Generators(plays.turns(*texts)), least_scored=0)
    runner._texts = {"shop": TextTools(plays.Template(), ToolCallParser.of("json"),
                                       lambda tokens: "".join(map(chr, tokens)), [0], 0)}

    async def run():
        facts = await runner._pools["shop"].start()
        assert facts.shape == "agent"
        runner._agents = {"shop"}
        await runner._gateway.start()
        try:
            return await plays.play(runner, row=ROW)
        finally:
            await runner.stop()

    rollout = asyncio.run(run())
    return plays.rows_of(rollout), rollout.episodes[0]


def test_the_function_runs_its_tool_and_judges_the_last_word(here):
    rows, episode = play(CALL % "gold", CALL % "tea", "It costs 3.", path="shop_agent.py:agent")
    assert rows == [f"Tgo?[{CALL % 'gold'}.]Error: KeyError: 'gold'#[{CALL % 'tea'}.]3#[It costs 3..]"]
    assert (episode.cause, episode.use, episode.turns[-1].reward) == ("completed", "train", 1.0)


def test_the_function_ends_when_the_turns_are_used_up(here):
    _, episode = play(CALL % "tea", path="shop_agent.py:agent", max_turns=2)
    assert (episode.cause, episode.use, len(episode.turns)) == ("truncated_turns", "train", 2)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("last, reward", [("It costs 3.", 1.0), ("It costs 4.", 0.0)])
def test_the_program_asks_by_curl(here, last, reward):
    settings = load(PPOConfig, "price.yaml", []).environments["shop"]
    rows, episode = play(last, command=settings.command.model_dump())
    assert rows == [f"go?[{last}.]"]
    assert (episode.cause, episode.turns[-1].reward) == ("completed", reward)


@pytest.mark.parametrize("last, reward", [("It costs 3.", 1.0), ("It costs 4.", 0.0)])
def test_anthropics_client_asks_the_same_session(here, last, reward):
    rows, episode = play(last, path="claude_agent.py:agent")
    assert rows == [f"go?[{last}.]"]
    assert (episode.cause, episode.turns[-1].reward) == ("completed", reward)


def test_the_configurations_of_the_page_can_run(here):
    assert {name: list(load(PPOConfig, name, []).environments) for name in ("shop.yaml", "price.yaml")} == {
        "shop.yaml": ["shop"], "price.yaml": ["shop"]}
    [moved] = [fence for fence in fences(PAGE) if fence.language == "yaml" and not fence.file]
    [(section, fields)] = yaml.safe_load(moved.text).items()
    changed = [f"--{section}.{name}={value}" for name, value in fields.items()]
    assert load(PPOConfig, "shop.yaml", changed).episode_runner.gateway_host == fields["gateway_host"]
