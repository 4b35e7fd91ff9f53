"""Sources become one reward: their sum, what each said, and nothing that nobody said."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_ray.errors import RewardError
from rlhf_ray.rewards.protocol import RewardAnswer, sample_names
from rlhf_ray.rewards.sources import WeightedSum


class Says:
    """A source that answers what it was made with, and remembers what was done with it."""

    def __init__(self, scores, token_rewards=None, failures=0, error=None, wait_s=0.0):
        self.log, self.error, self.wait_s = [], error, wait_s
        tokens = None if token_rewards is None else np.array(token_rewards, dtype=np.float32)
        self.answer = RewardAnswer(np.array(scores, dtype=np.float32), tokens, failures)

    async def start(self):
        self.log.append("start")

    async def score(self, requests):
        await asyncio.sleep(self.wait_s)
        if self.error:
            raise self.error
        self.log.append(len(requests))
        return self.answer

    async def stop(self):
        self.log.append("stop")


@pytest.fixture
def two(ask):
    """Two requests, of 3 and 4 tokens, 1 and 2 of them responses."""
    return [ask("one", 0), ask("two words", 1)]


def total(requests, **sources):
    return asyncio.run(WeightedSum(sources).score(requests))


def test_the_sum_is_weighted(two):
    scores = total(two, a=(2.0, Says([1, -1])), b=(-0.5, Says([3, 4], failures=1)), c=(0.0, Says([9, 9])))
    assert scores.scores.tolist() == [0.5, -4.0] and scores.scores.dtype == np.float32
    assert {name: part.tolist() for name, part in scores.components.items()} == {"a": [1, -1], "b": [3, 4], "c": [9, 9]}
    assert scores.failures == {"a": 0, "b": 1, "c": 0} and scores.token_rewards is None


def test_token_rewards_are_weighted_with_their_scores(two):
    steps = Says([0.5, 3.0], [0, 0, 0.5, 0, 0, 1.0, 2.0])
    scores = total(two, steps=(2.0, steps), outcome=(1.0, Says([10, 20])))
    assert scores.scores.tolist() == [11.0, 26.0]
    assert scores.token_rewards.tolist() == [0, 0, 1, 0, 0, 2, 4] and scores.token_rewards.dtype == np.float32


@given(scores=st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=2), weight=st.floats(-100, 100, width=32))
def test_one_source_of_weight_one_is_passed_on_to_the_bit(scores, weight):
    requests = [SimpleNamespace(tokens=np.zeros(1), key=None)] * 2
    given = np.array(scores, dtype=np.float32)
    assert total(requests, a=(1.0, Says(scores))).scores.tobytes() == (given + 0.0).tobytes()
    apart = total(requests, a=(weight, Says(scores)), b=(weight, Says(scores)))
    assert apart.scores == pytest.approx(2 * float(weight) * given.astype(np.float64), rel=1e-6, abs=1e-30)


@pytest.mark.parametrize("answer, said", [
    (Says([1.0]), r"rewards\.x gave 1 scores for 2 responses; it must give one"),
    (Says([[1.0], [2.0]]), r"gave scores of shape \(2, 1\) for 2 responses"),
    (Says([1.0, np.nan]), r"rewards\.x gave nan for 1 of 2 responses\n  prompt: 'a prompt'\n  response: 'two words'\nA "
                          r"missing score is never"),
    (Says([0.5, 3.0], [0, 0, 0.5, 0, 0, 1.0]), r"token rewards of shape \(6,\) for 7 tokens"),
    (Says([0.5, 3.0], [0, 0, 0.5, 0, 0, np.inf, 0]), r"or some that are not finite"),
    (Says([0.5, 3.0], [0, 0.5, 0, 0, 0, 1.0, 2.0]), r"gave rewards to tokens that the policy did not sample"),
    (Says([0.5, 4.0], [0, 0, 0.5, 0, 0, 1.0, 2.0]),
     r"rewards\.x gave 4\.0 to epoch 0 row 1 sample 0, but its token rewards add up to 3\.0"),
])
def test_an_answer_that_breaks_the_protocol_is_told(two, answer, said):
    with pytest.raises(RewardError, match=said):
        total(two, fine=(1.0, Says([1, 2])), x=(1.0, answer))


def test_a_sum_beyond_float32_is_told(two):
    with pytest.raises(RewardError, match=r"the weighted sum of rewards gave inf for 1 of 2 responses\n.*"
                                          r"\n  response: 'two words'\n.*weights"):
        total(two, a=(1e38, Says([1, 4])))


def test_a_failure_is_told_once_the_others_have_ended(two):
    slow = Says([1, 2], wait_s=0.1)
    with pytest.raises(RewardError, match="no luck"):
        total(two, bad=(1.0, Says([1, 2], error=RewardError("no luck"))), slow=(1.0, slow))
    assert slow.log == [2], "nothing goes on behind the run's back"


def test_sources_are_asked_side_by_side(two):
    async def live():
        meeting = asyncio.Barrier(2)

        class Meets(Says):
            async def score(self, requests):
                await asyncio.wait_for(meeting.wait(), 5)
                return self.answer

        return await WeightedSum({"a": (1.0, Meets([1, 2])), "b": (1.0, Meets([3, 4]))}).score(two)

    assert asyncio.run(live()).scores.tolist() == [4, 6]


def test_all_are_started_and_all_are_stopped_even_when_one_cannot():
    class Stubborn(Says):
        async def stop(self):
            raise OSError

    fine, sources = Says([1]), {}
    sources = {"stubborn": (1.0, Stubborn([1])), "fine": (1.0, fine)}
    asyncio.run(WeightedSum(sources).start())
    asyncio.run(WeightedSum(sources).stop())
    assert fine.log == ["start", "stop"]


def test_samples_by_name(ask):
    keys = [ask("", row).key for row in range(5)]
    assert sample_names(keys[:1]) == "epoch 0 row 0 sample 0"
    assert sample_names(keys).endswith("row 2 sample 0 and 2 more")
