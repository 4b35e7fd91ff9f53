"""Who is to blame when the scores of a chunk fail: named sample by sample, or nobody, and never a made-up score."""

import asyncio
import pickle

import numpy as np
import pytest

from rlhf_ray.config.rewards import FunctionReward
from rlhf_ray.errors import RewardError, SampleError, UnscoredSamples
from rlhf_ray.records import SampleKey
from rlhf_ray.rewards.failure_isolation import score_or_name_failed
from rlhf_ray.rewards.function_source import FunctionSource
from rlhf_ray.rewards.sources import WeightedSum
from tests.unit.rewards.http.conftest import requests_of, source_of
from tests.unit.rewards.http.fault_server import BEHAVIOURS, faulty

FUNCTION = """
import os, time

def score(prompts):
    for prompt in prompts:
        number = int(prompt.split()[-1])
        if number == 1:
            raise KeyError("no label for it")
        if number == 2:
            time.sleep(60)
        if number == 4:
            os._exit(3)
    return [float("nan") if p.endswith("3") else 1.0 for p in prompts]
"""


def blamed(source, requests):
    """What is said of each request without a score, by row."""
    async def run():
        total = WeightedSum({"main": (1.0, source)})
        await total.start()
        try:
            with pytest.raises(UnscoredSamples) as caught:
                await score_or_name_failed(total.score, requests)
            return {sample.key.row: sample for sample in caught.value.samples}, caught.value
        finally:
            await total.stop()

    return asyncio.run(run())


def test_each_kind_of_failure_of_a_function_is_blamed_on_its_sample(tmp_path):
    (tmp_path / "f.py").write_text(FUNCTION)
    source = FunctionSource("main", FunctionReward(type="function", function=f"{tmp_path}/f.py:score", timeout_s=1))
    found, error = blamed(source, requests_of(6))
    assert sorted(found) == [1, 2, 3, 4]
    words = {1: "no label for it", 2: "no answer within 1 s", 3: "gave nan", 4: "exit code 3"}
    for row, word in words.items():
        assert word in found[row].reason and f"prompt: 'Question {row}'" in found[row].reason
    assert (found[1].prompt, found[1].response) == ("Question 1", "Answer 1") and "row 1" in str(error)


def test_an_answer_of_the_wrong_length_that_no_sample_alone_has_ends_in_the_error_itself(tmp_path):
    (tmp_path / "f.py").write_text("def score(prompts):\n    return [1.0]\n")

    async def run():
        source = FunctionSource("main", FunctionReward(type="function", function=f"{tmp_path}/f.py:score"))
        total = WeightedSum({"main": (1.0, source)})
        await total.start()
        try:
            await score_or_name_failed(total.score, requests_of(3))
        finally:
            await total.stop()

    with pytest.raises(SampleError, match="gave 1 scores for 3 responses"):
        asyncio.run(run())


def test_a_function_that_fails_once_by_chance_gives_all_its_scores(tmp_path):
    (tmp_path / "f.py").write_text(f"""
import os

def score(prompts):
    if not os.path.exists("{tmp_path}/failed"):
        open("{tmp_path}/failed", "w").close()
        os._exit(3)
    return [float(p.split()[-1]) for p in prompts]
""")

    async def run():
        source = FunctionSource("main", FunctionReward(type="function", function=f"{tmp_path}/f.py:score"))
        total = WeightedSum({"main": (1.0, source)})
        await total.start()
        try:
            return (await score_or_name_failed(total.score, requests_of(3))).scores.tolist()
        finally:
            await total.stop()

    assert asyncio.run(run()) == [0, 1, 2]


def judging(refuse, monkeypatch, *others):
    """A server that gives an error for a request with one of the rows `refuse`, and otherwise the scores."""
    def behave(samples, headers):
        rows = {int(sample["prompt"].split()[-1]) for sample in samples}
        return BEHAVIOURS["400" if rows & refuse else "ok"](samples, headers)

    monkeypatch.setitem(BEHAVIOURS, "judge", behave)
    return faulty([*others, *["judge"] * 50])


def asked(server_of, requests, **settings):
    async def run():
        async with server_of as server, source_of(server.url, retries=1, **settings) as source:
            total = WeightedSum({"far": (1.0, source)})
            return await score_or_name_failed(total.score, requests)

    return asyncio.run(run())


def test_a_service_s_error_for_an_item_is_blamed_on_it(monkeypatch):
    with pytest.raises(UnscoredSamples, match="row 2 .*no such sample") as caught:
        asked(judging({2}, monkeypatch), requests_of(4))
    assert [sample.key for sample in caught.value.samples] == [SampleKey(0, 2, 0)]
    assert asked(judging({9}, monkeypatch), requests_of(4)).scores.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("behaviour", ["500", "reset", "401", "html", "other_model", "redirect"])
def test_a_service_that_is_down_or_another_is_nobody_s_fault(behaviour):
    with pytest.raises(RewardError) as caught:
        asked(faulty([behaviour] * 50), requests_of(3))
    assert not isinstance(caught.value, SampleError | UnscoredSamples)


def test_a_service_that_breaks_down_while_samples_are_asked_about_one_by_one_is_nobody_s_fault():
    with pytest.raises(RewardError) as caught:
        asked(faulty(["400", *["500"] * 50]), requests_of(3))
    assert not isinstance(caught.value, SampleError | UnscoredSamples)


def test_whole_scores_are_asked_for_once():
    calls = []

    async def score(requests):
        calls.append(len(requests))
        return np.zeros(len(requests))

    asyncio.run(score_or_name_failed(score, requests_of(5)))
    assert calls == [5]


def test_the_error_travels_between_processes_with_its_samples():
    error = UnscoredSamples("no score", [SampleKey(0, 1, 2)])
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.samples) == (UnscoredSamples, "no score", (SampleKey(0, 1, 2),))
