"""The reward service fails once for each order, and notes when it did and when it answered well again."""

import asyncio

import pytest

from chaos.kinds import SERVED
from chaos.service import Service, give_order, order_file, reward_service
from chaos.strikes import Strikes
from tests.unit.rewards.http.conftest import requests_of, source_of
from tests.unit.rewards.http.fault_server import BEHAVIOURS

ONE, OTHER = [{"tokens": [1]}], [{"tokens": [2]}]


def test_an_order_is_obeyed_once_and_is_over_when_the_same_samples_were_answered_well(tmp_path):
    service, strikes = Service(), Strikes(tmp_path / "strikes.jsonl")
    assert service.behaviour(ONE) == "ok"
    service.serve(strikes)
    give_order(strikes, 4, "nan")
    assert [service.behaviour(samples) for samples in (ONE, OTHER)] == ["nan", "ok"]
    assert not order_file(strikes).exists()
    assert [(line["event"], line["fault"]) for line in strikes.read()] == [("confirmed", 4)]
    assert service.behaviour([*OTHER, *ONE]) == "ok"
    assert [(line["event"], line["fault"]) for line in strikes.read()] == [("confirmed", 4), ("recovered", 4)]


def test_scores_that_are_believed_are_not_asked_for_again(tmp_path):
    service, strikes = Service(), Strikes(tmp_path / "strikes.jsonl")
    service.serve(strikes)
    give_order(strikes, 4, "largest")
    assert [service.behaviour(samples) for samples in (ONE, OTHER)] == ["largest", "ok"]
    assert [line["event"] for line in strikes.read()] == ["confirmed", "recovered"]


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
    assert [line["event"] for line in strikes.read()] == ["confirmed", "recovered"]


def test_a_prompt_that_is_refused_stays_so_and_others_have_scores(tmp_path):
    service, strikes = Service(), Strikes(tmp_path / "strikes.jsonl")
    service.serve(strikes)
    refused, other, same = ([{"tokens": tokens}] for tokens in ([7, 8, 1], [7, 9, 1], [7, 8, 2]))
    give_order(strikes, 4, "400")
    assert [service.behaviour(samples) for samples in ([*refused, *other], refused, other, same)] == [
        "400", "400", "ok", "400"]
    assert [(line["event"], line.get("prompt")) for line in strikes.read()] == [
        ("confirmed", "w7 w8"), ("recovered", None)]
    give_order(strikes, 5, "400")
    assert service.behaviour([*same, *other]) == "400" == service.behaviour(other), "another prompt each time"
    service.serve(strikes)
    assert service.behaviour(refused) == "ok", "another run"
