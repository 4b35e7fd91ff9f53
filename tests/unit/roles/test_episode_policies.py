"""What an episode runner does with each cause, by the fields of an environment; and which environment a row gets.

Generators, environments and the chat template are stand-ins: a token is a character, and 0 ends a turn.
"""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.prompts import NO_PROMPT
from rlhf_ray.environments.protocol import Start, Step
from rlhf_ray.environments.tool_calls import ToolCallParser
from rlhf_ray.errors import DataError, EpisodeFailed, ModelError, ReplayDiverged
from rlhf_ray.records import EvaluationPart, Prompts, RewardScores, SampleKey
from rlhf_ray.roles.engines.interface import Completion
from rlhf_ray.roles.episode import TextTools
from rlhf_ray.roles.episode_numbers import episode_numbers
from rlhf_ray.roles.episode_runner import EpisodeRunner
from rlhf_ray.roles.evaluation_metrics import pass_rates, summarise
from rlhf_ray.roles.reward_scorer import of_episodes

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
CALL = '{"name": "look", "arguments": {}}'
BROKEN = '{"name": "look", "arguments": '


class Template:
    """Messages are the characters of their contents."""

    def open(self, messages, tools=None, **_):
        return [ord(c) for message in messages for c in message["content"]]

    def delta(self, messages, tools=None, **_):
        return self.open(messages)

    def continues(self, messages, tools=None, **_):
        return True

    def assistant(self, text, **_):
        return {"role": "assistant", "content": text}

    def opens_reasoning(self, tools=None, options=None):
        return False


class Writer:
    """Generators that write given turns, one after the other, and the last one again and again."""

    def __init__(self, *turns):
        self.turns = list(turns)
        self.last = -1
        """After so many turns they write no more."""

    async def call(self, method, requests, *args, **named):
        [request] = requests
        if not self.last:
            await asyncio.sleep(30)
        self.last -= 1
        text = self.turns.pop(0) if len(self.turns) > 1 else self.turns[0]
        whole = [*map(ord, text), 0]
        kept = whole[:request.max_tokens]
        column = np.zeros(len(kept))
        reason = "stop" if len(kept) == len(whole) else "length"
        return [Completion(np.array(kept, np.int32), column.astype(np.float32), column.astype(np.int32), reason)]


class World:
    """A pool of environments whose steps do what is given: an answer, or an error that is raised."""

    def __init__(self, *steps, tools=TOOLS):
        self.steps, self.start, self.opened, self.interrupted = list(steps), Start(None, tools), 0, 0
        self.snapshot = None
        self.observation = ""
        self.lines = []
        self.resets = []
        """What the first resets raise."""
        self.given = 0.0
        """What get_reward returns."""
        self.failure = None
        """What it raises."""

    async def open(self, row, seed, played=None):
        self.opened += 1
        if self.resets:
            raise self.resets.pop(0)
        return self

    async def step(self, reply):
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        if isinstance(step, Exception):
            raise step
        return step

    async def reward(self):
        if self.failure:
            raise self.failure
        return self.given

    async def close(self):
        pass

    async def stop(self):
        pass

    def printed(self):
        return self.lines


MORE = Step([{"role": "tool", "content": "seen"}])
DONE = Step(done=True, reward=1.0)
LATE, BUG = EpisodeFailed("error_timeout", "late"), EpisodeFailed("error_environment", "a bug")


def runner_of(worlds, writer, fields, **options):
    environments = {name: EnvironmentConfig(path="world.py:World", **fields) for name in worlds}
    sampling = SamplingConfig(max_tokens=40)
    runner = EpisodeRunner(environments, ModelConfig(path="m"), sampling, writer, least_scored=0, **options)
    runner._pools = worlds
    texts = TextTools(Template(), ToolCallParser.of("json"), lambda tokens: "".join(map(chr, tokens)), [0], 0)
    runner._texts = dict.fromkeys(worlds, texts)
    return runner


def play(worlds, writer, rows=({},), held_out=False, fields=None, messages=None, **options):
    """One episode for each row; returns the rollout."""
    prompts = Prompts(
        offsets=np.arange(len(rows) + 1), tokens=np.zeros(len(rows), np.int32), texts=["go"] * len(rows),
        metadata=[dict(row) for row in rows], rows=np.arange(len(rows)), messages=messages)
    runner = runner_of(worlds, writer, fields or {}, **options)
    keys = [SampleKey(0, row, 0) for row in range(len(rows))]
    return asyncio.run(runner.play(prompts, keys, 0, held_out=held_out))


def episode(world, *turns, held_out=False, **fields):
    [found] = play({"world": world}, Writer(*turns), held_out=held_out, fields=fields).episodes
    return found


def test_an_episode_that_completes_is_trained_on_with_its_rewards():
    found = episode(World(MORE, DONE), CALL)
    assert (found.cause, found.use) == ("completed", "train")
    assert [turn.reward for turn in found.turns] == [0.0, 1.0]


@pytest.mark.parametrize("turns", [1, 3])
def test_an_episode_has_at_most_max_turns(turns):
    found = episode(World(MORE), CALL, max_turns=turns)
    assert (found.cause, len(found.turns)) == ("truncated_turns", turns)


def test_an_episode_has_at_most_max_tokens_with_what_it_read():
    rollout = play({"world": World(MORE)}, Writer(CALL), fields={"max_tokens": 50})
    [found] = rollout.episodes
    assert found.cause == "truncated_episode" and rollout.lengths.tolist() == [50]
    # 2 of the prompt, 34 of a call with its end, 4 of the answer, and the 10 that are left
    assert len(CALL) == 33 and [turn.stop - turn.start for turn in found.turns] == [34, 10]


def test_a_call_that_cannot_be_read_is_answered_and_the_episode_continues():
    found = episode(World(DONE), BROKEN, CALL)
    assert (found.cause, found.events["parse_failures"]) == ("completed", 1)
    assert "cannot be read" in found.turns[0].messages[0]["content"]


@pytest.mark.parametrize("policy", ["train", "mask", "zero"])
def test_a_call_that_cannot_be_read_may_end_the_episode(policy):
    found = episode(World(DONE), BROKEN, CALL, on_failure={"parse": policy})
    assert (found.cause, found.use, len(found.turns)) == ("error_parse", policy, 1)


@pytest.mark.parametrize("policy", ["train", "mask", "zero", "quarantine"])
def test_an_episode_past_a_deadline_is_used_as_configured(policy):
    found = episode(World(LATE), CALL, on_failure={"timeout": policy})
    assert (found.cause, found.use, found.error) == ("error_timeout", policy, "late")


@pytest.mark.parametrize("policy", ["mask", "zero", "quarantine"])
def test_an_episode_whose_environment_failed_is_used_as_configured(policy):
    found = episode(World(BUG), CALL, on_failure={"environment": policy})
    assert (found.cause, found.use, found.error) == ("error_environment", policy, "a bug")


@pytest.mark.parametrize("policy", ["train", "mask", "zero"])
def test_an_episode_that_ran_out_of_turns_is_used_as_configured(policy):
    found = episode(World(MORE), CALL, max_turns=2, on_failure={"overflow": policy})
    assert (found.cause, found.use) == ("truncated_turns", policy)


@pytest.mark.parametrize("retries", [0, 2])
def test_a_failed_episode_begins_again_so_often_and_is_quarantined_then(retries):
    world = World(BUG)
    found = episode(world, CALL, on_failure={"environment": "retry", "retries": retries})
    assert (found.use, world.opened) == ("quarantine", 1 + retries)
    again = World(BUG, DONE)
    found = episode(again, CALL, on_failure={"environment": "retry", "retries": 2})
    assert (found.cause, found.events["retries"], again.opened) == ("completed", 1, 2)


def test_an_episode_that_did_not_begin_has_the_tokens_of_its_prompt():
    class Broken(World):
        async def open(self, row, seed, played=None):
            raise BUG

    prompts = Prompts(np.array([0, 2, 5]), np.array([7, 8, 1, 2, 3], np.int32), ["a", "b"], [{}, {}], np.arange(2))
    runner = runner_of({"world": Broken()}, Writer("a"), {"max_tokens": 2})
    rollout = asyncio.run(runner.play(prompts, [SampleKey(0, 1, 0), SampleKey(0, 0, 0)], 0, held_out=True))
    assert [rollout.row(i, "tokens").tolist() for i in range(2)] == [[ord("b")], [ord("a")]]
    assert [episode.use for episode in rollout.episodes] == ["mask", "mask"] and not rollout.response_mask.any()


def test_an_evaluation_has_no_quarantine():
    assert episode(World(BUG), CALL, held_out=True, on_failure={"environment": "quarantine"}).use == "mask"


class Sometimes(World):
    """Fails in the rows that say so, in the others each episode has their reward."""

    async def open(self, row, seed, played=None):
        step = BUG if row["fails"] else Step(done=True, reward=row["reward"])
        return World(step)


def test_a_failed_episode_counts_in_an_evaluations_denominator_and_not_in_its_reward():
    rows = [{"fails": False, "reward": 1.0}, {"fails": True}, {"fails": False, "reward": 0.5}, {"fails": True}]
    fields = {"on_failure": {"environment": "quarantine"}}
    rollout = play({"world": Sometimes()}, Writer(CALL), rows, held_out=True, fields=fields)
    kept = [i for i, each in enumerate(rollout.episodes) if each.use == "train"]
    given = np.array([rollout.episodes[i].turns[0].reward for i in kept], np.float32)
    scores = of_episodes(RewardScores(given, {"environment": given}), kept, rollout)
    part = EvaluationPart(
        rows=np.arange(4), scores=scores.scores, components=scores.components, gold=None, kl=None,
        reference_logprobs=None, lengths=np.ones(4, np.int64), finished=np.ones(4, bool), digests=np.arange(4),
        bigrams=np.arange(4), texts=[], episodes=episode_numbers(rollout.episodes))
    found = summarise([part]) | pass_rates([part], {"environment": 1.0}, "environment")
    # Of 4 episodes 1 is solved, and the mean of the 2 rewards is (1 + 0.5) / 2.
    assert (found["solved"], found["pass@1/environment"], found["failed"]) == (0.25, 0.25, 2.0)
    assert (found["reward"], found["responses"], found["cause/error_environment"]) == (0.75, 4.0, 0.5)


def test_a_column_names_the_environment_where_there_are_several():
    worlds = {"one": World(DONE), "two": World(DONE)}
    rows = [{"world": "two"}, {"world": "two"}, {"world": "one"}]
    found = play(worlds, Writer(CALL), rows, column="world").episodes
    assert [each.environment for each in found] == ["two", "two", "one"]
    assert (worlds["one"].opened, worlds["two"].opened) == (1, 2)


def test_a_row_that_names_none_of_several_environments_is_an_error_with_its_value():
    worlds = {"one": World(DONE), "two": World(DONE)}
    with pytest.raises(DataError, match=r"row 0: column 'environment' is 'three'.*one, two"):
        play(worlds, Writer(CALL), [{"environment": "three"}])
    assert episode(World(DONE), CALL).environment == "world", "one environment needs no column"


def test_a_numbered_row_has_an_empty_prompt_and_the_environment_gives_what_is_read():
    world = World(DONE)
    world.start = Start([{"role": "user", "content": "Guess."}], [])
    rows = []
    world.open = lambda row, seed, played=None, opened=world.open: (rows.append(row), opened(row, seed))[1]
    [found] = play({"world": world}, Writer("7"), [{"index": 3}], messages=[NO_PROMPT]).episodes
    assert rows == [{"prompt": "", "index": 3}]
    assert (found.cause, found.messages) == ("completed", world.start.messages)


def test_a_numbered_row_is_enough_where_reset_of_a_class_with_tools_returned_text():
    world = World(DONE)
    world.observation = "Buy tea."
    [found] = play({"world": world}, Writer(CALL), [{"index": 3}], messages=[NO_PROMPT]).episodes
    assert (found.cause, found.messages) == ("completed", [{"role": "user", "content": "Buy tea."}])


def test_a_numbered_row_without_a_message_of_the_environment_is_its_failure():
    [found] = play({"world": World(DONE)}, Writer(CALL), [{"index": 3}], messages=[NO_PROMPT],
                   fields={"on_failure": {"environment": "mask"}}).episodes
    assert found.cause == "error_environment" and "the policy has nothing to read" in found.error


class Refuses(Template):
    """Refuses or cannot encode some messages, and writes nothing for an empty one."""

    def open(self, messages, tools=None, **_):
        for message in messages:
            if message["role"] == "narrator":
                raise ModelError("the chat template refuses the role narrator")
            message["content"].encode()
        return super().open(messages)


NARRATED, HALF = {"role": "narrator", "content": "x"}, {"role": "tool", "content": "\ud800"}


@pytest.mark.parametrize("message, begins", [
    (NARRATED, False), (NARRATED, True), (HALF, False), (HALF, True), ({"role": "tool", "content": ""}, False)])
def test_messages_of_the_environment_that_cannot_be_read_are_its_failure_and_not_the_run_s(message, begins):
    world = World(DONE) if begins else World(Step([message]))
    if begins:
        world.start = Start([message])
    runner = runner_of({"world": world}, Writer("a"), {"on_failure": {"environment": "mask"}})
    runner._texts = {"world": TextTools(Refuses(), ToolCallParser.of("json"), lambda t: "".join(map(chr, t)), [0], 0)}
    prompts = Prompts(np.arange(2), np.zeros(1, np.int32), ["go"], [{}], np.arange(1))
    [found] = asyncio.run(runner.play(prompts, [SampleKey(0, 0, 0)], 0)).episodes
    assert (found.cause, found.use) == ("error_environment", "quarantine" if begins else "mask")
    assert f"environments.world: {'reset' if begins else 'step'} answered with messages that" in found.error


def test_a_prompt_of_the_row_that_the_template_refuses_is_an_error_of_the_run():
    runner = runner_of({"world": World(DONE)}, Writer("a"), {})
    runner._texts = {"world": TextTools(Refuses(), ToolCallParser.of("json"), lambda t: "".join(map(chr, t)), [0], 0)}
    prompts = Prompts(np.arange(2), np.zeros(1, np.int32), ["go"], [{}], np.arange(1),
                      messages=[[{"role": "narrator", "content": "go"}]])
    with pytest.raises(ModelError, match="narrator"):
        asyncio.run(runner.play(prompts, [SampleKey(0, 0, 0)], 0))


def test_the_policy_reads_what_reset_of_a_class_with_tools_returned_at_the_end_of_its_prompt():
    world = World(DONE)
    world.observation = " Level 3."
    rollout = play({"world": world}, Writer("a"))
    assert rollout.episodes[0].messages == [{"role": "user", "content": "go Level 3."}]
    read = rollout.tokens[~rollout.response_mask].tolist()
    assert "".join(map(chr, read)) == "go Level 3."


def test_a_beginning_without_room_for_a_turn_is_quarantined_and_no_longer_than_an_episode():
    world = World(DONE)
    world.start = Start([{"role": "user", "content": "x" * 1000}])
    rollout = play({"world": world}, Writer("a"), fields={"max_tokens": 50})
    [found] = rollout.episodes
    assert (found.cause, found.use, rollout.lengths.tolist()) == ("truncated_episode", "quarantine", [50])
    assert "the 1000 tokens before it fill environments.world.max_tokens=50" in found.error


def test_an_environment_that_is_lost_with_neighbours_again_and_again_fails_and_the_run_goes_on():
    class Lost(World):
        async def step(self, reply):
            raise ReplayDiverged("lost with another episode")

    world = Lost(DONE)
    found = episode(world, "a", on_failure={"environment": "mask"})
    assert (found.cause, found.use, found.events["interrupted"], world.opened) == ("error_environment", "mask", 6, 6)
    assert found.error == "lost with another episode"


def test_one_sample_may_be_played_twice_at_a_time_as_in_training_and_evaluation():
    async def run():
        runner = runner_of({"world": World(DONE)}, Writer("a"), {})
        prompts = Prompts(np.arange(2), np.zeros(1, np.int32), ["go"], [{}], np.arange(1))
        keys = [SampleKey(0, 0, 0)]
        found = await asyncio.gather(*(runner.play(prompts, keys, seed) for seed in range(2)))
        assert not runner.activity()
        return [each.episodes[0].cause for each in found]

    assert asyncio.run(run()) == ["completed", "completed"]


@pytest.mark.parametrize("held_out", [False, True])
def test_an_episode_that_never_begins_has_the_row_s_prompt_and_no_sampled_token(held_out):
    world = World(DONE)
    world.resets = [BUG]
    rollout = play({"world": world}, Writer(CALL), [{}, {}], held_out, {"on_failure": {"environment": "mask"}})
    assert [each.use for each in rollout.episodes] == ["mask" if held_out else "quarantine", "train"]
    assert rollout.lengths.tolist() == [2, 2 + len(CALL) + 1]
    assert rollout.tokens[:2].tolist() == [ord("g"), ord("o")] and not rollout.response_mask[:2].any()


def test_the_beginnings_of_an_episode_that_is_lost_with_its_neighbours_share_one_deadline():
    class Slow(World):
        async def open(self, row, seed, played=None):
            self.opened += 1
            await asyncio.sleep(0.06)
            raise ReplayDiverged("lost")

    world = Slow(DONE)
    found = episode(world, CALL, timeout_s={"episode": 0.1})
    assert (found.cause, world.opened) == ("error_timeout", 2)


def test_a_runner_has_at_most_so_many_open_episodes_of_an_environment():
    class Counted(World):
        now = most = 0

        async def open(self, row, seed, played=None):
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0.001)
            return self

        async def close(self):
            self.now -= 1

    world = Counted(DONE)
    assert len(play({"world": world}, Writer(CALL), rows=[{}] * 7, fields={"concurrency": 3}).episodes) == 7
    assert world.most == 3


def test_an_attempt_counts_its_turns_from_the_first_in_what_it_says():
    seen = []

    class Watched(World):
        async def open(self, row, seed, played=None):
            seen.append(runner.activity()[0]["turn"])
            return await super().open(row, seed, played)

    runner = runner_of({"world": Watched(MORE, BUG, DONE)}, Writer(CALL), {"on_failure": {"environment": "retry"}})
    prompts = Prompts(np.arange(2), np.zeros(1, np.int32), ["go"], [{}], np.arange(1))
    asyncio.run(runner.play(prompts, [SampleKey(0, 0, 0)], 0))
    assert seen == [1, 1]


class Rewrites(Template):
    """Writes earlier turns in capitals once others follow, and a call as it would write it itself."""

    def continues(self, messages, tools=None, **_):
        return False

    def assistant(self, text, **_):
        return {"role": "assistant", "content": text.upper()}


ODD_CALL = '{"name":   "look","arguments":{}}'


@pytest.mark.parametrize("template", [Template(), Rewrites()])
def test_a_sampled_turn_is_never_written_again_from_what_was_read_in_it(template):
    """Nor does a template that rewrites history stall an episode: a new segment of the same sample begins."""
    runner = runner_of({"world": World(MORE, MORE, DONE)}, Writer(ODD_CALL), {})
    runner._texts["world"] = replace(runner._texts["world"], template=template)
    prompts = Prompts(np.arange(2), np.zeros(1, np.int32), ["go"], [{}], np.arange(1))
    rollout = asyncio.run(runner.play(prompts, [SampleKey(0, 0, 0)], 0))
    sampled = "".join(map(chr, rollout.tokens[rollout.response_mask]))
    assert sampled == f"{ODD_CALL}\0" * 3
    assert (rollout.sample_count, len(rollout)) == (1, 3 if isinstance(template, Rewrites) else 1)
    assert [turn.row for turn in rollout.episodes[0].turns] == (
        [0, 1, 2] if isinstance(template, Rewrites) else [0, 0, 0])


def test_an_error_and_a_straggler_take_nothing_from_the_other_episodes_of_a_step():
    class Sleepy(World):
        async def step(self, reply):
            await asyncio.sleep(30)

    worlds = {"good": World(MORE, DONE), "bad": World(BUG), "slow": Sleepy(DONE)}
    found = play(worlds, Writer(CALL), [{"environment": name} for name in ("good", "bad", "slow", "good")],
                 fields={"timeout_s": {"episode": 0.1}, "on_failure": {"environment": "mask"}}).episodes
    assert [(each.cause, each.use) for each in found] == [
        ("completed", "train"), ("error_environment", "mask"), ("error_timeout", "mask"), ("completed", "train")]
    assert "in turn 1 it waited for tool `look`" in found[2].error


def test_nothing_of_an_attempt_that_failed_is_in_the_one_that_follows():
    again, fresh = World(MORE, BUG, DONE), World(DONE)
    rollout = play({"world": again}, Writer(CALL), fields={"on_failure": {"environment": "retry"}})
    expected = play({"world": fresh}, Writer(CALL))
    assert again.opened == 2 and rollout.tokens.tolist() == expected.tokens.tolist()
    assert [turn.seed for turn in rollout.episodes[0].turns] == [turn.seed for turn in expected.episodes[0].turns]
    assert rollout.episodes[0].events == {"retries": 1, "tool_calls": 1}
