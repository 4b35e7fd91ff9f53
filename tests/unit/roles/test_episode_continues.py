"""Episodes of runners that were lost: another one goes on with them from their journals, after any of their records, as
if nothing had happened. Environments are real processes; generators and the chat template are stand-ins: a token is a
character, and 0 ends a turn."""

import asyncio
import contextlib
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.prompts import sample_seed
from rlhf_ray.environments.tool_calls import ToolCallParser
from rlhf_ray.records import Prompts, SampleKey
from rlhf_ray.roles.engines.interface import Completion
from rlhf_ray.roles.episode import TextTools, turn_seed
from rlhf_ray.roles.episode_journal import HEAD, TRAINING, JournalPlace, JournalReader, episode, last_attempt
from rlhf_ray.roles.episode_runner import EpisodeRunner
from tests.unit.roles.test_episode_policies import BROKEN, Rewrites, Template

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
        self.turns = {turn_seed(sample_seed(0, KEY), row, turn): turn for turn in range(20) for row in range(turn + 1)}
        self.asked = []
        """Numbers of the turns that were sampled."""
        self.hold = -1
        """This turn is never sampled."""
        self.held = asyncio.Event()

    async def call(self, method, requests, *args, **named):
        [request] = requests
        turn = self.turns[request.seed]
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
        runner = EpisodeRunner({"till": config}, ModelConfig(path="m"), SamplingConfig(max_tokens=60), policy,
                               least_scored=0)
        runner._texts = {"till": TextTools(template or Template(), ToolCallParser.of("json"),
                                           lambda tokens: "".join(map(chr, tokens)), [0], 0)}
        try:
            await runner._pools["till"].start()
            yield runner
        finally:
            await runner.stop()

    return build


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
    places = [0]
    while places[-1] < len(data):
        _, _, text, arrays = HEAD.unpack_from(data, places[-1])
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
