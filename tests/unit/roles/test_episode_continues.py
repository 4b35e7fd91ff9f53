"""Episodes of runners that were lost: another one goes on with them from their journals, after any of their records, as
if nothing had happened. Environments are real processes; generators and the chat template are stand-ins: a token is a
character, and 0 ends a turn."""

import asyncio
import contextlib
import copy
import errno
import os
import threading
import time
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.environments.pool import EnvironmentPool
from rlhf_ray.environments.protocol import Step
from rlhf_ray.environments.tool_calls import ToolCallParser
from rlhf_ray.records import Prompts, SampleKey
from rlhf_ray.roles import episode_journal
from rlhf_ray.roles.engines.interface import Completion
from rlhf_ray.roles.episode import TextTools
from rlhf_ray.roles.episode_journal import (
    FILE_HEAD_BYTES,
    HEAD,
    TRAINING,
    JournalPlace,
    JournalReader,
    Needed,
    episode,
    last_attempt,
)
from rlhf_ray.roles.episode_runner import EpisodeRunner
from tests.unit.roles import test_episode_policies as policies
from tests.unit.roles.test_episode_policies import (
    BROKEN,
    BUG,
    CALL,
    DONE,
    LATE,
    MORE,
    NARRATED,
    Refuses,
    Rewrites,
    Template,
    World,
    Writer,
)

KEY = SampleKey(0, 0, 0)
ADD = '{"name": "add", "arguments": {"number": %d}}'
WRONG = '{"name": "add", "arguments": {"number": "x"}}'
SCRIPT = (ADD % 2, BROKEN, WRONG, ADD % 5, "done")
"""Tool calls, one that cannot be read, and one that the tool refuses."""
CODE = '''
import os, time

class Till:
    """Adds up. Waits, fails and ends its process as files beside this one say, each of which it removes first."""
    def reset(self, folder, seed):
        self.folder, self.sum, self.calls = folder, seed % 10, 0
        self._told("reset")
        return f" at {self.sum}"
    def add(self, number: int) -> int:
        """Adds.

        Args:
            number: what
        """
        self.calls += 1
        self._told(f"call{self.calls}")
        self.sum += number
        return self.sum
    def get_reward(self):
        self._told("reward")
        return self.sum / 8
    def _told(self, when):
        with open(f"{self.folder}/done", "a") as file: print(when, file=file)
        for what in ("wait", "fail"):
            try: os.remove(f"{self.folder}/{what}-{when}")
            except FileNotFoundError: continue
            if what == "fail": os._exit(3)
            time.sleep(600)

class Keeps(Till):
    replayable = False
    def snapshot(self): return [self.folder, self.sum, self.calls]
    def restore(self, kept): self.folder, self.sum, self.calls = kept

class Forgets(Till):
    replayable = False

class Moody(Till):
    def reset(self, folder, seed):
        super().reset(folder, seed)
        return f" at {len(open(f'{folder}/done').readlines())}"

class Talks:
    """In messages: rewards and numbers of each turn, which are no binary fractions."""
    def reset(self, row, seed):
        self.turn, self.number = 0, seed
        return {"messages": [{"role": "user", "content": f"begin {seed}"}]}
    def step(self, reply):
        self.turn += 1
        self.number = (self.number * 31 + len(reply.text)) % 1009
        return {"messages": [{"role": "user", "content": str(self.number)}], "reward": self.number / 7,
                "done": self.turn == 4, "info": {"number": self.number / 3}}
'''


class Policy:
    """Generators that write a script, with log-probabilities and sampling masks that follow from the turn's seed."""

    def __init__(self, script=SCRIPT, version=0):
        self.script, self.version = script, version
        self.asked = []
        """Numbers of the turns that were sampled."""
        self.hold = -1
        """This turn is never sampled."""
        self.held = asyncio.Event()

    def _written(self, prompt):
        """How many turns of the script the policy reads, in their order; a template may write them in capitals."""
        text, at, turn = "".join(map(chr, prompt)).lower(), 0, 0
        while (found := text.find(last := self.script[min(turn, len(self.script) - 1)].lower(), at)) >= 0:
            at, turn = found + len(last), turn + 1
        return turn

    async def call(self, method, requests, *args, **named):
        [request] = requests
        turn = self._written(request.prompt)
        self.asked.append(turn)
        if turn == self.hold:
            self.held.set()
            await asyncio.Event().wait()
        whole = [*map(ord, self.script[min(turn, len(self.script) - 1)]), 0]
        kept = whole[:request.max_tokens]
        random = np.random.default_rng(request.seed)
        masks = tuple(random.integers(0, 99, size).astype(np.int32) for size in random.integers(1, 5, len(kept)))
        return [Completion(np.array(kept, np.int32), -random.random(len(kept)).astype(np.float32),
                           np.full(len(kept), self.version, np.int32),
                           "stop" if len(kept) == len(whole) else "length", masks)]


@pytest.fixture
def runner_of(tmp_path):
    """runner_of(policy, name="Till", template=Template(), **fields): a started runner of one environment, as an
    asynchronous context manager."""
    (tmp_path / "mine.py").write_text(CODE)

    @contextlib.asynccontextmanager
    async def build(policy, name="Till", template=None, **given):
        config = EnvironmentConfig(path=f"{tmp_path}/mine.py:{name}", processes=1, **given)
        runner = runner_with(EnvironmentPool("till", config), config, policy, template or Template())
        try:
            await runner._pools["till"].start()
            yield runner
        finally:
            await runner.stop()

    return build


def runner_with(pool, config, policy, template):
    runner = EpisodeRunner({"till": config}, ModelConfig(path="m"), SamplingConfig(max_tokens=60), policy,
                           least_scored=0)
    runner._pools = {"till": pool}
    runner._texts = {"till": TextTools(template, ToolCallParser.of("json"), lambda tokens: "".join(map(chr, tokens)),
                                       [0], 0)}
    return runner


def successor(runner, template=None):
    """Another process of a runner; that its environments live in the same processes saves starting these."""
    return runner_with(runner._pools["till"], runner._environments["till"], runner._generators,
                       template or Template())


def play(runner, tmp_path, place, **options):
    prompts = Prompts(np.arange(2), np.zeros(1, np.int32), ["go"], [{"folder": str(tmp_path)}], np.arange(1))
    return runner.play(prompts, [KEY], 0, journal=place, **options)


def directory_of(tmp_path, name, journal=None):
    """A directory of journals; with one of another process."""
    (tmp_path / name).mkdir()
    if journal is not None:
        (tmp_path / name / "other.journal").write_bytes(journal)
    return str(tmp_path / name)


def only_journal(directory):
    [path] = [each for each in Path(directory).glob("*.journal") if each.name != "other.journal"]
    return path


def recorded(path, scope=TRAINING):
    reader = JournalReader(path)
    reader.refresh()
    return episode(last_attempt(reader.entries[scope, KEY]))


def frames_of(data):
    """Where each frame of a journal begins, and where the last one ends."""
    places = [FILE_HEAD_BYTES]
    while places[-1] < len(data):
        _, text, arrays = HEAD.unpack_from(data, places[-1])
        places.append(places[-1] + HEAD.size + text + arrays)
    return places


def assert_same(found, expected, **events):
    """Two rollouts are equal, but for these events of its episode."""
    for each in fields(expected):
        one, other = getattr(found, each.name), getattr(expected, each.name)
        if each.name == "episodes":
            counted = Counter(other[0].events) + Counter(events)
            assert one == [replace(other[0], events=dict(counted))]
        elif isinstance(other, np.ndarray):
            assert one.dtype == other.dtype and one.tobytes() == other.tobytes(), each.name
        else:
            assert one == other, each.name


CASES = {
    "tools": ("Till", Template(), SCRIPT, {}),
    "segments": ("Till", Rewrites(), SCRIPT, {}),
    "messages": ("Talks", Template(), ("one", "three", "ab"), {}),
    "out of turns": ("Till", Template(), SCRIPT, {"max_turns": 3}),
    "out of tokens": ("Till", Template(), SCRIPT, {"max_tokens": 130}),
    "a turn cut off": ("Till", Template(), (ADD % 2, "x" * 80), {}),
    "a call that ends it": ("Till", Template(), SCRIPT, {"on_failure": {"parse": "zero"}}),
    "snapshots": ("Keeps", Template(), SCRIPT, {}),
}


@pytest.mark.parametrize("name, template, script, given", CASES.values(), ids=CASES)
def test_an_episode_goes_on_after_any_record_as_if_nothing_had_happened(
        runner_of, tmp_path, name, template, script, given):
    async def live():
        policy = Policy(script)
        async with runner_of(policy, name, template, **given) as runner:
            expected = await play(runner, tmp_path, None)
            assert len(policy.asked) >= 2 and expected.mask_sizes is not None
            whole = directory_of(tmp_path, "whole")
            assert_same(await play(runner, tmp_path, JournalPlace(whole, 0, 0)), expected)
            data = only_journal(whole).read_bytes()
            places = frames_of(data)
            turns = len(expected.episodes[0].turns)
            unanswered = recorded(only_journal(whole)).turns[-1].answer is None
            assert len(places) - 1 == 3 + turns
            for number, place in enumerate(places):
                for torn in (0, 7) if place < len(data) else (0,):
                    cut = directory_of(tmp_path, f"cut{number}-{torn}", data[:place + torn])
                    policy.asked.clear()
                    found = await play(runner, tmp_path, JournalPlace(cut, 0, 0, look=True))
                    done = min(max(number - 2, 0), turns)  # after a start, and an answer to reset
                    ended = number == 3 + turns
                    if unanswered and done == turns and not ended:  # recorded with its outcome, or not at all
                        done -= 1
                    assert policy.asked == list(range(done, turns)), (number, torn)
                    assert_same(found, expected, continued=int(done > 0 and not ended))
                    again = recorded(only_journal(cut))
                    assert (len(again.turns), again.outcome is not None) == (turns, True)

    asyncio.run(live())


async def lose(runner, policy, tmp_path, place, turn):
    """A runner plays until it has a turn sampled, and is lost then."""
    policy.hold = turn
    policy.held.clear()
    playing = asyncio.ensure_future(play(runner, tmp_path, place))
    await policy.held.wait()
    playing.cancel()
    await asyncio.wait([playing])
    policy.hold = -1
    policy.asked.clear()


@pytest.mark.parametrize("name", ["Till", "Keeps"])
def test_runners_that_are_lost_one_after_the_other_while_a_turn_is_sampled_cost_that_turn_each(
        runner_of, tmp_path, name):
    async def live():
        policy = Policy()
        place = JournalPlace(directory_of(tmp_path, "run"), 0, 0, look=True)
        async with runner_of(policy, name) as runner:
            expected = await play(runner, tmp_path, None)
            for turn in range(len(SCRIPT)):
                await lose(successor(runner), policy, tmp_path, place, turn)
            (tmp_path / "done").unlink()
            assert_same(await play(successor(runner), tmp_path, place), expected, continued=len(SCRIPT) - 1)
        assert policy.asked == [len(SCRIPT) - 1]
        calls = {"Till": ["reset", "call1", "call2", "reward"], "Keeps": ["reward"]}  # repeated, or restored
        assert (tmp_path / "done").read_text().split() == calls[name]

    asyncio.run(live())


def test_an_environment_that_has_answered_nothing_but_reset_is_restored_from_its_snapshot_after_that(
        runner_of, tmp_path):
    """It is not replayable, and the calls of the first turns could not be read."""
    async def live():
        policy = Policy((BROKEN, BROKEN, ADD % 2, "done"))
        directory = directory_of(tmp_path, "run")
        place = JournalPlace(directory, 0, 0, look=True)
        async with runner_of(policy, "Keeps") as runner:
            expected = await play(runner, tmp_path, None)
            await lose(successor(runner), policy, tmp_path, place, 2)
            assert recorded(only_journal(directory)).reset["snapshot"] == {"json": [str(tmp_path), 0, 0]}
            (tmp_path / "done").unlink()
            last = successor(runner)
            assert_same(await play(last, tmp_path, place), expected, continued=1)
        assert policy.asked == [2, 3] and (tmp_path / "done").read_text().split() == ["call1", "reward"]
        ended = recorded(last._journal.path)
        assert "snapshot" not in ended.reset and ended.turns[-1].snapshot is not None, "the newest one is kept"

    asyncio.run(live())


@pytest.mark.parametrize("call, turn", [("reset", 0), ("call1", 0), ("call2", 3), ("reward", 5)])
def test_a_runner_that_is_lost_while_the_environment_answers_costs_that_turn(runner_of, tmp_path, call, turn):
    async def live():
        policy = Policy()
        place = JournalPlace(directory_of(tmp_path, "run"), 0, 0, look=True)
        async with runner_of(policy) as runner:
            expected = await play(runner, tmp_path, None)
            (tmp_path / "done").unlink()
            (tmp_path / f"wait-{call}").touch()
            playing = asyncio.ensure_future(play(runner, tmp_path, place))
            while (tmp_path / f"wait-{call}").exists():
                await asyncio.sleep(0.01)
            playing.cancel()
            await asyncio.wait([playing])
            policy.asked.clear()
            assert_same(await play(successor(runner), tmp_path, place), expected, continued=int(turn > 0))
        assert policy.asked == list(range(turn, len(SCRIPT)))

    asyncio.run(live())


class Louder(Template):
    def open(self, messages, tools=None, **_):
        return [ord("!"), *super().open(messages)]

    def delta(self, messages, tools=None, **_):
        return super().open(messages)


@pytest.mark.parametrize("name, template", [("Forgets", Template()), ("Moody", Template()), ("Till", Louder())])
def test_an_episode_that_cannot_go_on_begins_again_and_is_counted(runner_of, tmp_path, name, template):
    """Its environment is not replayable, or answers differently, or the record is of other tokens."""
    async def live():
        policy = Policy()
        directory = directory_of(tmp_path, "run")
        async with runner_of(policy, name) as runner:
            await lose(runner, policy, tmp_path, JournalPlace(directory, 0, 0), 3)
            lost = only_journal(directory)
            runner = successor(runner, template)
            found = await play(runner, tmp_path, JournalPlace(directory, 1, 0, look=True))
            assert policy.asked == [0, 1, 2, 3, 4]
            if name != "Moody":  # whose reset says something else each time
                assert_same(found, await play(runner, tmp_path, None), restarted=1)
            assert found.episodes[0].events["restarted"] == 1 and "continued" not in found.episodes[0].events
        lost.unlink()
        again = recorded(only_journal(directory))
        assert (again.start.attempt, again.start.version) == (1, 1) and again.start.events["restarted"] == 1

    asyncio.run(live())


def test_an_ended_episode_that_does_not_fit_its_record_begins_again(runner_of, tmp_path):
    async def live():
        policy = Policy()
        async with runner_of(policy) as runner:
            await play(runner, tmp_path, JournalPlace(directory_of(tmp_path, "run"), 0, 0))
            policy.asked.clear()
            runner = successor(runner, Louder())
            found = await play(runner, tmp_path, JournalPlace(str(tmp_path / "run"), 0, 0, look=True))
            assert policy.asked == [0, 1, 2, 3, 4]
            assert_same(found, await play(runner, tmp_path, None), restarted=1)

    asyncio.run(live())


class Once(World):
    """Has no second reset."""

    async def open(self, row, seed, played=None):
        self.resets = [BUG] * self.opened
        return await super().open(row, seed, played)


ENDS = {
    "completed": (World(MORE, DONE), {}),
    "masked after a deadline": (World(MORE, LATE), {}),
    "quarantined": (World(MORE, BUG), {"on_failure": {"environment": "quarantine"}}),
    "quarantined after retries": (World(MORE, BUG), {"on_failure": {"retries": 2}}),
    "quarantined in its second reset": (Once(MORE, BUG), {"on_failure": {"retries": 1}}),
    "no reset": (World(DONE), {"on_failure": {"environment": "mask"}}),
    "unreadable": (World(MORE, Step([NARRATED])), {"on_failure": {"environment": "zero"}}),
    "no reward": (World(MORE, DONE), {"on_failure": {"environment": "zero"}}),
    "out of turns": (World(MORE), {"max_turns": 3, "on_failure": {"overflow": "zero"}}),
    "too slow": (World(MORE), {"timeout_s": {"episode": 0.5}, "on_failure": {"timeout": "train"}}),
}


class Unopened(World):
    """Is not asked anything."""

    async def open(self, row, seed, played=None):
        raise AssertionError("it was opened")


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("name", ENDS)
def test_an_episode_that_has_ended_is_what_it_was_without_generator_and_environment(tmp_path, name, held_out):
    world, given = ENDS[name]
    world = copy.deepcopy(world)
    world.given = 0.25
    if name == "no reset":
        world.resets = [BUG]
    if name == "no reward":
        world.failure = BUG
    writer = Writer(CALL)
    if name == "too slow":
        writer.last = 2
    directory = directory_of(tmp_path, "run")

    def played(world, writer, look, journal=True):
        runner = policies.runner_of({"world": world}, writer, given)
        runner._texts["world"] = replace(runner._texts["world"], template=Refuses())
        place = JournalPlace(directory, 0, 0, look=look) if journal else None
        return asyncio.run(play(runner, tmp_path, place, held_out=held_out))

    expected = played(world, writer, look=False)
    found = played(Unopened(), Writer(), look=True)
    assert_same(found, expected)
    assert_same(played(Unopened(), Writer(), look=True), expected)  # and from what the second one copied
    [ended] = expected.episodes
    assert (ended.cause == "completed") == (name == "completed")
    if name == "quarantined":
        assert ended.use == ("mask" if held_out else "quarantine")


def test_what_two_scopes_record_of_one_key_does_not_mix(tmp_path):
    async def live():
        directory = directory_of(tmp_path, "run")
        found = {}
        for scope, world in (("training", World(MORE, DONE)), ("evaluation of version 3", World(DONE))):
            runner = policies.runner_of({"world": world}, Writer(CALL), {})
            found[scope] = await play(runner, tmp_path, JournalPlace(directory, 0, 0, scope))
        for scope in found:
            runner = policies.runner_of({"world": Unopened()}, Writer(), {})
            assert_same(await play(runner, tmp_path, JournalPlace(directory, 0, 0, scope, look=True)), found[scope])
        assert [len(each.episodes[0].turns) for each in found.values()] == [2, 1]

    asyncio.run(live())


def test_retries_in_all_processes_together_are_bounded(tmp_path):
    """Of one retry that is allowed, the lost process had made one."""
    async def live():
        directory = directory_of(tmp_path, "run")
        given = {"on_failure": {"environment": "retry", "retries": 1}}
        policy = Policy([CALL])
        failing = policies.runner_of({"world": World(MORE, BUG, MORE)}, policy, given)
        await lose(failing, policy, tmp_path, JournalPlace(directory, 0, 0), 3)  # in its second attempt
        world = World(BUG)
        [found] = (await play(policies.runner_of({"world": world}, policy, given), tmp_path,
                              JournalPlace(directory, 0, 0, look=True))).episodes
        assert (found.use, found.events["retries"], world.opened, policy.asked) == ("quarantine", 1, 1, [3])

    asyncio.run(live())


def test_an_attempt_that_has_not_sampled_anything_is_still_counted(tmp_path):
    async def live():
        directory = directory_of(tmp_path, "run")
        given = {"on_failure": {"environment": "retry", "retries": 1}}
        policy = Policy([CALL])

        class Second(World):
            async def open(self, row, seed, played=None):
                if self.opened == 1:
                    policy.held.set()
                    await asyncio.Event().wait()
                return await super().open(row, seed, played)

        await lose(policies.runner_of({"world": Second(BUG)}, policy, given), policy, tmp_path,
                   JournalPlace(directory, 0, 0), -1)
        world = World(BUG)
        [found] = (await play(policies.runner_of({"world": world}, policy, given), tmp_path,
                              JournalPlace(directory, 0, 0, look=True))).episodes
        assert (found.use, world.opened) == ("quarantine", 1)
        assert found.events == {"retries": 1, "tool_calls": 1}

    asyncio.run(live())


def test_the_environments_interruptions_in_all_processes_are_counted(tmp_path):
    async def live():
        directory = directory_of(tmp_path, "run")
        policy = Policy([CALL])
        for turn, lost in ((1, 2), (2, 1)):
            world = World(MORE)
            world.interrupted = lost
            await lose(policies.runner_of({"world": world}, policy, {}), policy, tmp_path,
                       JournalPlace(directory, 0, 0, look=True), turn)
        [found] = (await play(policies.runner_of({"world": World(DONE)}, policy, {}), tmp_path,
                              JournalPlace(directory, 0, 0, look=True))).episodes
        assert found.events == {"tool_calls": 3, "interrupted": 3, "continued": 2}

    asyncio.run(live())


@pytest.mark.parametrize("policy_of_it, use", [("mask", "mask"), ("train", "train"), ("retry", "quarantine")])
def test_the_time_of_an_episode_is_that_of_all_processes_together(tmp_path, policy_of_it, use):
    async def live():
        directory = directory_of(tmp_path, "run")
        given = {"timeout_s": {"episode": 0.9}, "on_failure": {"timeout": policy_of_it}}

        class Slow(World):
            async def open(self, row, seed, played=None):
                await asyncio.sleep(0)
                return await super().open(row, seed, played)

            async def step(self, reply):
                await asyncio.sleep(0.6)
                return MORE

        policy = Policy([CALL])
        await lose(policies.runner_of({"world": Slow()}, policy, given), policy, tmp_path,
                   JournalPlace(directory, 0, 0), 1)
        runner = policies.runner_of({"world": Slow()}, policy, given)
        began = time.monotonic()
        [found] = (await play(runner, tmp_path, JournalPlace(directory, 0, 0, look=True))).episodes
        assert time.monotonic() - began < 0.59
        assert (found.cause, found.use, len(found.turns)) == ("error_timeout", use, 2)
        assert found.events == {"tool_calls": 2, "continued": 1}
        lost = max(Path(directory).glob("*"), key=lambda path: path.stat().st_mtime)
        assert recorded(lost).age_s >= 0.6
        # It ends also if nothing is left of its time when it is looked up.
        for journal in Path(directory).glob("*"):
            if journal != lost:
                journal.unlink()
        whole = recorded(lost)
        over = replace(whole, outcome=None, turns=[replace(whole.turns[0], age_s=9.0)])
        head = lost.read_bytes()[:FILE_HEAD_BYTES]
        lost.write_bytes(head + b"".join(frame.encoded() for frame in over.frames(TRAINING, KEY)))
        policy.asked.clear()
        [found] = (await play(policies.runner_of({"world": Slow()}, policy, given), tmp_path,
                              JournalPlace(directory, 0, 0, look=True))).episodes
        assert (found.cause, found.use, len(found.turns), policy.asked) == ("error_timeout", use, 1, [])

    asyncio.run(live())


@pytest.mark.parametrize("defect", ["no space", "gone", "hung", "hung look"])
def test_a_journal_that_cannot_be_written_fails_no_episode_and_is_said_once(tmp_path, monkeypatch, defect):
    directory = directory_of(tmp_path, "run")
    release = threading.Event()

    def hangs(*_):
        release.wait()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(episode_journal, "PATIENCE_S", 0.2)
    if defect == "gone":
        os.rmdir(directory)
    elif defect == "hung look":
        monkeypatch.setattr(JournalReader, "refresh", hangs)
        directory_of(tmp_path, "former")
        Path(directory, "other.journal").touch()
    else:
        monkeypatch.setattr(episode_journal, "_write", {"no space": full, "hung": hangs}[defect])

    async def live():
        runner = policies.runner_of({"world": World(MORE, DONE, MORE, DONE)}, Writer(CALL), {})
        expected = await play(policies.runner_of({"world": World(MORE, DONE)}, Writer(CALL), {}), tmp_path, None)
        place = JournalPlace(directory, 0, 0, look=True)
        assert_same(await play(runner, tmp_path, place), expected)
        assert_same(await play(runner, tmp_path, place), expected)
        assert runner._pools["world"].lines == []
        [warning] = runner.printed()
        said = {"no space": "No space left", "gone": "No such file", "hung": "no progress", "hung look": "no progress"}
        assert "From now on episodes begin again" in warning and said[defect] in warning
        assert runner.printed() == []

    try:
        asyncio.run(live())
    finally:
        release.set()


def test_a_runner_forgets_what_is_not_needed_and_names_its_file(tmp_path):
    async def live():
        directory = directory_of(tmp_path, "run")
        runner = policies.runner_of({"world": World(DONE)}, Writer(CALL), {})
        name = await runner.forget(directory, Needed(0, -1, 0))
        await play(runner, tmp_path, JournalPlace(directory, 3, 3))
        assert only_journal(directory).name == name
        assert await runner.forget(str(tmp_path), Needed(4, 4, 0)) == name, "of another directory"
        assert await runner.forget(directory, Needed(3, 2, 0)) == name
        assert recorded(only_journal(directory)).outcome is not None
        assert await runner.forget(directory, Needed(4, 4, 0)) == name
        assert list(Path(directory).iterdir()) == []
        await play(runner, tmp_path, JournalPlace(directory, 4, 4))
        assert only_journal(directory).name == name and recorded(only_journal(directory)).start.version == 4

    asyncio.run(live())
