"""Environments of gymnasium as text. The oracle is the library itself, played directly with the same seeds and actions
(gymnasium 1.4.0)."""

import asyncio
import os
import signal
import sys

import numpy as np
import pytest

from rlhf_ray.config.environment_sources import GymnasiumSource
from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.environments.adapters import gymnasium as adapter
from rlhf_ray.environments.pool import EnvironmentPool
from rlhf_ray.environments.protocol import Reply
from rlhf_ray.environments.shapes import recognise
from rlhf_ray.errors import ConfigError
from tests.pages import ROOT, fences

gymnasium = pytest.importorskip("gymnasium", reason="needs the extra: pip install 'rlhf-ray[gymnasium]'")
spaces = gymnasium.spaces
LAKE = {"id": "FrozenLake-v1", "options": {"is_slippery": False}}
MOVES = ["left", "down", "right", "up"]


def make(**fields):
    return adapter.make(GymnasiumSource(**fields).model_dump(mode="json"))


def started(seed=0, prompt="", **fields):
    """An episode, and what the policy reads first."""
    episode = make(**fields)()
    return episode, episode.reset(row={"prompt": prompt, "index": 0}, seed=seed).messages


def said(step):
    [message] = step.messages
    assert message["role"] == "user"
    return message["content"]


class Odd(gymnasium.Env):
    """An environment with given spaces, whose observation is a sample."""

    def __init__(self, observation=None, action=None):
        self.observation_space = observation or spaces.Discrete(2)
        self.action_space = action or spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        self.taken = action
        return self.observation_space.sample(), 0.5, False, False, {}


@pytest.fixture
def odd(monkeypatch):
    """odd(observation=..., action=...) -> the fields of an environment with these spaces."""
    monkeypatch.setitem(gymnasium.registry, "Odd-v0", None)

    def register(**given):
        del gymnasium.registry["Odd-v0"]
        gymnasium.register("Odd-v0", entry_point=lambda: Odd(**given), disable_env_checker=True)
        return {"id": "Odd-v0"}

    return register


def test_a_lake_is_crossed_by_the_names_of_actions_and_drawn_as_text():
    episode, first = started(**LAKE, actions=MOVES)
    assert first == [{"role": "user", "content": "You act in FrozenLake-v1. Write one of the actions: left, down, "
                                                 "right, up.\n\n[S]FFF\nFHFH\nFFFH\nHFFG"}]
    steps = [episode.step(Reply(text, text)) for text in ("down", "Down!", "I go right", "3, no: right", "1", "right")]
    assert said(steps[0]) == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert [step.reward for step in steps] == [0, 0, 0, 0, 0, 1]
    assert [step.done for step in steps] == [False] * 5 + [True]
    assert not any(step.truncated for step in steps)


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_a_slippery_lake_answers_as_the_library_does_with_the_same_seed_and_actions(seed):
    direct = gymnasium.make("FrozenLake-v1", is_slippery=True)
    expected = [(str(direct.reset(seed=seed)[0]), 0.0, False, False)]
    actions = [int(n) for n in np.random.default_rng(seed).integers(0, 4, 20)]
    for action in actions:
        observation, reward, done, truncated, _ = direct.step(action)
        expected.append((str(observation), reward, done, truncated))
        if done:
            break
    episode, first = started(seed, "{observation}", id="FrozenLake-v1", options={"is_slippery": True}, rendering=False)
    found = [(first[0]["content"], 0.0, False, False)]
    for action in actions[:len(expected) - 1]:
        step = episode.step(Reply(str(action), str(action)))
        found.append((said(step), step.reward, step.done, step.truncated))
    assert found == expected


def test_a_pole_is_balanced_in_numbers_as_the_library_gives_them():
    direct = gymnasium.make("CartPole-v1")
    observation, _ = direct.reset(seed=4)
    episode, first = started(4, "{observation}", id="CartPole-v1")
    shown = [first[0]["content"]]
    expected = ["[" + ", ".join(repr(float(f"{x:.4g}")) for x in observation.tolist()) + "]"]
    done, rewards = False, []
    while not done:
        observation, _, done, _, _ = direct.step(1)
        expected.append("[" + ", ".join(repr(float(f"{x:.4g}")) for x in observation.tolist()) + "]")
        step = episode.step(Reply("1", "1"))
        shown.append(said(step))
        rewards.append(step.reward)
        assert step.done == done
    assert shown == expected and rewards == [1.0] * len(rewards) and len(rewards) > 5


def test_a_time_limit_truncates_and_does_not_complete():
    episode, _ = started(**{**LAKE, "options": {"is_slippery": False, "max_episode_steps": 2}}, actions=MOVES)
    first, second = (episode.step(Reply("left", "left")) for _ in range(2))
    assert (first.done, first.truncated, second.done, second.truncated) == (False, False, False, True)


def test_what_is_no_action_is_answered_and_counted_and_the_world_stays():
    episode, _ = started(**LAKE, actions=MOVES)
    wrong = [episode.step(Reply(text, text)) for text in ("I wait", "7")]
    assert [said(step) for step in wrong] == [
        f"{what} Write one of the actions: left, down, right, up."
        for what in ("There is no action in 'I wait'.", "'7' is no action.")]
    assert [step.info for step in wrong] == [{"invalid_action": 1}, {"invalid_action": 2}]
    assert [(step.reward, step.done, step.truncated) for step in wrong] == [(0.0, False, False)] * 2
    step = episode.step(Reply("right", "right"))
    assert said(step) == "  (Right)\nS[F]FF\nFHFH\nFFFH\nHFFG" and step.info["invalid_action"] == 2


def test_reasoning_is_not_read_as_an_action():
    episode, _ = started(**LAKE, actions=MOVES)
    step = episode.step(Reply("<think>left or right?</think>down", "down", "left or right?"))
    assert said(step).startswith("  (Down)")


@pytest.mark.parametrize(("text", "action"), [
    ("2", 2), ("I choose 1.", 1), ("first 1, then 0", 0), ("right", 2), ("UP", 3), ("rightwards", None), ("2.5", None),
    ("x2", None), ("-1", None), ("4", None), ("", None), ("9" * 30, None), ("up, or 1", 1), ("1 or up", 3),
])
def test_the_last_number_or_name_is_the_action(text, action):
    read = adapter.Actions(spaces.Discrete(4), MOVES, "x").read
    if action is None:
        with pytest.raises(ValueError, match="no action"):
            read(text)
    else:
        assert read(text) == action


def test_numbers_of_actions_begin_where_the_space_does():
    actions = adapter.Actions(spaces.Discrete(3, start=5), ["a", "b", "c"], "x")
    assert (actions.read("b"), actions.read("7")) == (6, 7)
    assert adapter.Actions(spaces.Discrete(3, start=5), [], "x").form == "Write the number of an action, from 5 to 7."
    with pytest.raises(ValueError, match="'1' is no action"):
        actions.read("1")


@pytest.mark.parametrize(("space", "text", "action"), [
    (spaces.Box(-2, 2, (2,), np.float32), "I take [0.5, -1]", [0.5, -1.0]),
    (spaces.Box(-2, 2, (2,), np.float32), "[9, 9] and then [1, 2]", [1.0, 2.0]),
    (spaces.Box(-2, 2, (2,), np.float32), "[0.5, 3]", None),
    (spaces.Box(-2, 2, (2,), np.float32), "[0.5]", None),
    (spaces.Box(-2, 2, (2,), np.float32), "[NaN, 1]", None),
    (spaces.Box(-2, 2, (2,), np.float32), "0.5 1", None),
    (spaces.Box(-2, 2, (2,), np.float32), "[[1], [1, 2]]", None),
    (spaces.Box(-2, 2, (1, 2), np.float32), "[[1, 2]]", [[1.0, 2.0]]),
    (spaces.MultiDiscrete([2, 3]), "[1, 2]", [1, 2]),
    (spaces.MultiDiscrete([2, 3]), "[1, 3]", None),
    (spaces.MultiDiscrete([2, 3]), "[0.5, 1]", None),
    (spaces.MultiDiscrete([2, 3]), '["1", "2"]', None),
    (spaces.MultiBinary(3), "[0, 1, 1]", [0, 1, 1]),
    (spaces.MultiBinary(3), "[0, 1, 2]", None),
    (spaces.Text(5, charset="abc"), " abc\n", "abc"),
    (spaces.Text(5, charset="abc"), "abcabc", None),
    (spaces.Text(5, charset="abc"), "xyz", None),
])
def test_other_actions_are_lists_or_texts_of_the_space(space, text, action):
    actions = adapter.Actions(space, [], "x")
    if action is None:
        with pytest.raises(ValueError, match="no action|no list"):
            actions.read(text)
    else:
        found = actions.read(text)
        assert (found if isinstance(found, str) else found.tolist()) == action and space.contains(found)


@pytest.mark.parametrize(("space", "value", "text"), [
    (spaces.Discrete(9), np.int64(4), "4"),
    (spaces.Text(9), "as it is", "as it is"),
    (spaces.Box(-9, 9, (2, 1), np.float32), np.array([[1.23456], [-2]], np.float32), "[[1.235], [-2.0]]"),
    (spaces.Box(0, 255, (2,), np.uint8), np.array([7, 8], np.uint8), "[7, 8]"),
    (spaces.MultiBinary(2), np.array([0, 1], np.int8), "[0, 1]"),
    (spaces.Tuple((spaces.Discrete(9), spaces.Text(9))), (3, "é"), '[3, "é"]'),
    (spaces.Dict({"a": spaces.MultiDiscrete([3, 4]), "b": spaces.Discrete(2)}),
     {"a": np.array([1, 2]), "b": np.int64(1)}, '{"a": [1, 2], "b": 1}'),
])
def test_an_observation_is_written_as_a_number_a_text_or_json(space, value, text):
    assert adapter.unreadable(space) == "" and adapter.as_text(space, value) == text


@pytest.mark.parametrize(("space", "why"), [
    (spaces.Box(0, 255, (64, 64, 3), np.uint8), r"Box of shape \(64, 64, 3\) and type uint8 is a picture"),
    (spaces.Box(0, 1, (2000,), np.float32), "2000 numbers, more than 1024"),
    (spaces.Dict({"camera": spaces.Box(0, 255, (8, 8, 3), np.uint8)}), "is a picture"),
    (spaces.Sequence(spaces.Discrete(3)), "its space is Sequence"),
])
def test_observations_that_cannot_be_text_are_refused_with_the_reason(odd, space, why):
    with pytest.raises(ValueError, match=f"its observations cannot be written as text: .*{why}"):
        make(**odd(observation=space))


def test_actions_that_cannot_be_written_are_refused(odd):
    with pytest.raises(ValueError, match="its actions cannot be written as text: its action space is Dict"):
        make(**odd(action=spaces.Dict({"a": spaces.Discrete(2)})))


@pytest.mark.parametrize(("fields", "why"), [
    ({**LAKE, "actions": ["go"]}, r"actions=\['go'\] has 1 names, and there are 4 actions"),
    ({"id": "Pendulum-v1", "actions": ["go"]}, "names the actions of a Discrete space"),
    ({"id": "Nowhere-v0"}, "gymnasium.make.'Nowhere-v0'. failed: NameNotFound"),
    ({"id": "FrozenLake-v1", "options": {"ice": 1}}, "ice=1. failed: TypeError"),
])
def test_settings_that_do_not_fit_the_environment_are_refused(fields, why):
    with pytest.raises(ValueError, match=why):
        make(**fields)


@pytest.mark.parametrize(("fields", "why"), [
    ({"options": {"render_mode": "human"}}, "options.render_mode='human' cannot be set"),
    ({"actions": ["up", "UP"]}, "has a name twice"),
])
def test_settings_that_cannot_act_are_refused(fields, why):
    with pytest.raises(ConfigError, match=why):
        GymnasiumSource(id="FrozenLake-v1", **fields)


def test_a_drawing_with_several_colours_keeps_their_names():
    assert adapter.without_colours("\x1b[41mS\x1b[0mF") == "[S]F"
    assert adapter.without_colours("|\x1b[35mR\x1b[0m: |\x1b[34;1mB\x1b[0m") == "|[magenta R]: |[blue B]"
    _, first = started(0, "{observation}", id="Taxi-v4")
    assert "[yellow" in first[0]["content"] and "\x1b" not in first[0]["content"]


@pytest.mark.parametrize(("prompt", "own", "messages"), [
    ("", None, [("user", "You act in FrozenLake-v1. Write the number of an action, from 0 to 3.\n\n0")]),
    ("", "Cross it: {observation}.", [("user", "Cross it: 0.")]),
    ("Cross: {observation}", "Not this.", [("user", "Cross: 0")]),
    ("Cross.", None, [("user", "Cross.\n\n0")]),
    ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}], None,
     [("system", "Be brief."), ("user", "Go.\n\n0")]),
    ([{"role": "system", "content": "See {observation}"}], None, [("system", "See 0")]),
    ([{"role": "system", "content": "Be brief."}], None, [("system", "Be brief."), ("user", "0")]),
])
def test_the_first_message_is_the_row_s_the_setting_s_or_made_from_the_spaces(prompt, own, messages):
    episode = make(**LAKE, rendering=False, prompt=own)()
    first = episode.reset(row={"prompt": prompt}, seed=0).messages
    assert [(each["role"], each["content"]) for each in first] == messages


def test_it_is_an_environment_that_can_be_repeated():
    target = recognise(make(**LAKE))
    assert (target.shape, target.replayable, target.restorable) == ("environment", True, False)


def test_an_episode_whose_process_was_killed_is_brought_back_by_the_same_actions():
    async def run():
        config = EnvironmentConfig(gymnasium={"id": "FrozenLake-v1", "actions": MOVES})  # slippery
        pool = EnvironmentPool("lake", config)
        try:
            await pool.start()
            straight, killed = [await pool.open({"prompt": ""}, seed=11) for _ in range(2)]
            moves = [Reply(move, move) for move in ("right", "left")]
            answers = [[await each.step(move) for move in moves] for each in (straight, killed)]
            [process] = [each for each in pool._hosts._processes if killed._episode._number in each.episodes]
            os.kill(process._process.pid, signal.SIGKILL)
            await process._process.ending()
            for found, each in zip(answers, (straight, killed), strict=True):
                found.append(await each.step(Reply("left", "left")))
            return answers, killed.interrupted
        finally:
            await pool.stop()

    (straight, killed), interrupted = asyncio.run(run())
    assert straight == killed and interrupted == 1


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A directory with the files of docs/gymnasium.md. `tests/slow/test_pages.py` runs its commands."""
    for fence in fences(ROOT / "docs/gymnasium.md"):
        if fence.file:
            (tmp_path / fence.file).write_text(fence.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_the_lake_of_the_page_is_drawn_as_the_page_has_it(page):
    config = load(PPOConfig, "lake.yaml", [])
    made = adapter.make(config.environments["lake"].gymnasium.model_dump(mode="json"))
    episode, texts = made(), [fence.text for fence in fences(ROOT / "docs/gymnasium.md") if fence.language == "text"]
    [first] = episode.reset(row={"prompt": ""}, seed=0).messages
    assert [first["content"] + "\n", said(episode.step(Reply("", "I go down."))) + "\n"] == texts
    assert config.prompts.numbered.count == 1000


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_environment_of_one_s_own_is_registered_by_its_module(page, monkeypatch, seed):
    monkeypatch.delitem(gymnasium.registry, "Corridor-v0", raising=False)
    monkeypatch.delitem(sys.modules, "corridor", raising=False)
    config = load(PPOConfig, "corridor.yaml", [])
    episode = adapter.make(config.environments["corridor"].gymnasium.model_dump(mode="json"))()
    [first] = episode.reset(row={"prompt": "Where? {observation}."}, seed=seed).messages
    sign = first["content"].removeprefix("Where? The sign says: ").removesuffix(".")
    exit_is = ["left", "right"][int(np.random.default_rng(np.random.SeedSequence(seed)).integers(2))]
    assert sign == exit_is, "gymnasium seeds numpy's generator with it"
    step = episode.step(Reply("", f"I go {sign}"))
    assert (step.reward, step.done) == (1.0, True)


def test_a_missing_library_is_named_with_the_extra_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ImportError, match=r"pip install 'rlhf-ray\[gymnasium\]'"):
        make(**LAKE)
