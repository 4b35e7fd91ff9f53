"""The reward function of the runs fails once for each order, and its callers get their scores all the same."""

import asyncio

import pytest

from chaos import reward_function
from chaos.injection_log import INJECTION_LOG, InjectionLog
from rlhf_ray.config.rewards import FunctionReward
from rlhf_ray.rewards.failure_isolation import score_or_name_failed
from rlhf_ray.rewards.function_source import FunctionSource
from tests.unit.rewards.http.conftest import requests_of


@pytest.fixture
def injections(tmp_path, monkeypatch):
    log = InjectionLog(tmp_path / "injections.jsonl")
    monkeypatch.setenv(INJECTION_LOG, str(log.path))
    return log


@pytest.mark.parametrize("failure", [
    pytest.param("hang", marks=pytest.mark.slow), pytest.param("fork", marks=pytest.mark.slow), "flood"])
def test_a_scorer_gets_all_scores_although_the_function_fails(injections, monkeypatch, failure, capfd):
    monkeypatch.setattr(reward_function, "FLOOD_BYTES", 2**16)
    config = FunctionReward(type="function", function=f"{reward_function.__file__}:score", timeout_s=2.0)

    async def scores():
        source = FunctionSource("function", config)
        await source.start()
        try:
            expected = (await source.score(requests_of(3))).scores.tolist()
            reward_function.order_failure(injections.path, 4, failure)
            return expected, (await score_or_name_failed(source.score, requests_of(3))).scores.tolist(), \
                (await source.score(requests_of(3))).scores.tolist()
        finally:
            await source.stop()

    expected, meanwhile, after = asyncio.run(scores())
    assert expected == meanwhile == after and len(set(expected)) == 1
    assert [(line["event"], line["fault"]) for line in injections.read()] == [("confirmed", 4), ("recovered", 4)]
    assert not reward_function.order_file(injections.path).exists()
    capfd.readouterr()
