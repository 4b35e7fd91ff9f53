"""Each thing that can go wrong with a reward service, on real sockets: a right score in the end, or a typed error."""

import asyncio
import json

import numpy as np
import pytest

from rlhf_ray.errors import RewardError
from tests.unit.rewards.http.conftest import requests_of, source_of
from tests.unit.rewards.http.fault_server import faulty, seeded

MENDABLE = {
    "500": "http_500", "408": "http_408", "503": "http_503", "503_date": "http_503", "slow": "timeout",
    "trickle": "timeout", "truncated": "truncated", "hang_up": "connection", "reset": "connection",
    "no_http": "connection", "nan": "not_finite", "infinite": "not_finite", "beyond_float32": "not_finite",
    "too_few": "schema", "too_many": "schema", "words": "schema", "booleans": "schema", "null": "schema",
    "list": "schema", "newer": "schema", "bad_json": "json", "nested": "json", "html": "content_type",
    "gzip": "content_type", "huge": "too_large", "other_model": "other_model",
}
"""What the server does -> the kind of failure that is counted."""
SHORT = 1.0
"""Seconds that requests may take where the server takes longer."""


def time_for(behaviour):
    return {"request_timeout_s": SHORT} if behaviour in ("slow", "trickle") else {}


def score(server_behaviours, count=3, **settings):
    """(answer, server) of one call of score."""
    async def run():
        async with faulty(server_behaviours) as server, source_of(server.url, **settings) as source:
            return await source.score(requests_of(count)), server

    return asyncio.run(run())


@pytest.mark.parametrize("behaviour", MENDABLE)
def test_a_fault_that_passes_is_waited_out_and_counted(behaviour):
    answer, server = score([behaviour], **time_for(behaviour))
    assert answer.scores.tolist() == [0, 1, 2] and answer.scores.dtype == np.float32
    assert server.seen == [behaviour, "ok"]
    assert answer.failure_kinds == {MENDABLE[behaviour]: 1} and answer.failures == 3


@pytest.mark.parametrize("behaviour", MENDABLE)
def test_a_fault_that_stays_is_an_error_and_never_a_score(behaviour):
    with pytest.raises(RewardError) as caught:
        score([behaviour] * 10, retries=1, **time_for(behaviour))
    message = str(caught.value)
    assert "the reward service 'quality' gave no scores for 3 samples (epoch 0 row 0 sample 0, " in message
    assert "2 tries failed. Last, http://127.0.0.1:" in message and "rewards.quality" in message


@pytest.mark.parametrize(("behaviour", "words"), [
    ("400", 'it answers 400: {"error": "no such sample"}'), ("401", "check the token"), ("404", "nothing here"),
    ("redirect", "which is not followed"),
])
def test_an_answer_that_will_not_change_is_not_asked_for_again(behaviour, words):
    async def run():
        async with faulty([behaviour]) as server, source_of(server.url) as source:
            with pytest.raises(RewardError, match="a retry would not help") as caught:
                await source.score(requests_of(2))
            return str(caught.value), server.seen

    message, seen = asyncio.run(run())
    assert words in message and seen == [behaviour]


def test_a_full_server_is_left_alone_for_as_long_as_it_asks():
    answer, server = score(["429"])
    assert answer.scores.tolist() == [0, 1, 2] and answer.failure_kinds == {"http_429": 1}
    assert server.asked[1].at - server.asked[0].at >= 0.99


def test_tries_end_when_the_time_does():
    with pytest.raises(RewardError, match=r"no scores within timeout_s=1: |no scores within timeout_s=1\. Last") as e:
        score(["slow"] * 10, timeout_s=1, request_timeout_s=0.3)
    assert "no answer within 0.3 s" in str(e.value)


def test_a_server_that_is_gone_is_told_with_its_address():
    async def run():
        async with faulty() as server, source_of(server.url, retries=1) as source:
            url = server.url
            await source.score(requests_of(1))
            server.behaviours = iter(["reset"] * 5)
            with pytest.raises(RewardError, match=url):
                await source.score(requests_of(1))

    asyncio.run(run())


def test_one_batch_without_scores_fails_the_call_and_leaves_nothing_running():
    async def run():
        behaviours = ["ok", "400", "slow", "slow", "slow"]
        async with faulty(behaviours) as server, source_of(server.url, batch_size=2) as source:
            with pytest.raises(RewardError):
                await source.score(requests_of(10))
            others = asyncio.all_tasks() - {asyncio.current_task()}
            return [t for t in others if "score" in repr(t.get_coro())]

    assert asyncio.run(run()) == []


@pytest.mark.parametrize("seed", range(4))
def test_among_random_faults_every_sample_gets_its_own_score(seed):
    mix = dict.fromkeys(["500", "503", "reset", "truncated", "nan", "too_few", "bad_json", "hang_up"], 0.06)

    async def run():
        sick, better = seeded(seed, {"ok": 0.52, **mix}), seeded(seed + 99, {"ok": 0.7, **mix})
        async with (faulty(sick) as one, faulty(better) as two,
                    source_of(one.url, two.url, batch_size=3, retries=30) as source):
            answers = await asyncio.gather(*(source.score(requests_of(40, first)) for first in (0, 1000)))
            return answers, one.asked + two.asked

    answers, asked = asyncio.run(run())
    assert [a.scores.tolist() for a in answers] == [list(range(40)), list(range(1000, 1040))]
    wrong = [a for a in asked if a.behaviour != "ok"]
    assert wrong and sum(sum(a.failure_kinds.values()) for a in answers) == len(wrong)
    keys = {}
    for a in asked:  # a repeated request is the same request
        assert keys.setdefault(a.headers["idempotency-key"], json.dumps(a.samples)) == json.dumps(a.samples)
    assert len(keys) == 2 * 14 and len(set(keys.values())) == 2 * 14
