"""The reward service fails once for each order, and notes when it did and when it answered well again."""

import asyncio

import pytest

from chaos.kinds import SERVED
from chaos.service import Service, give_order, order_file, reward_service
from chaos.strikes import Strikes
from tests.unit.rewards.http.conftest import requests_of, source_of
from tests.unit.rewards.http.fault_server import BEHAVIOURS


def test_an_order_is_obeyed_once_and_noted(tmp_path):
    service, strikes = Service(), Strikes(tmp_path / "strikes.jsonl")
    behaviours = service.behaviours()
    assert next(behaviours) == "ok"
    service.serve(strikes)
    give_order(strikes, 4, "nan")
    assert [next(behaviours) for _ in range(3)] == ["nan", "ok", "ok"]
    assert not order_file(strikes).exists()
    assert [(line["event"], line["fault"]) for line in strikes.read()] == [("confirmed", 4), ("mended", 4)]


def test_every_way_to_fail_is_one_of_the_server_s():
    assert set(SERVED) <= {*BEHAVIOURS, "slow", "reset"}


@pytest.mark.parametrize("behaviour", ["500", "nan", "reset"])
def test_a_source_gets_its_scores_all_the_same(tmp_path, behaviour):
    strikes = Strikes(tmp_path / "strikes.jsonl")

    async def scores(url):
        async with source_of(url) as source:
            return (await source.score(requests_of(3))).scores.tolist()

    with reward_service() as service:
        service.serve(strikes)
        give_order(strikes, 1, behaviour)
        assert asyncio.run(scores(service.url)) == [0, 1, 2]
    assert [line["event"] for line in strikes.read()] == ["confirmed", "mended"]
