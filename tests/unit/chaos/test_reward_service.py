"""The reward service fails once for each order, and logs the failure and the recovery."""

import asyncio

import pytest

from chaos.injection_log import InjectionLog
from chaos.kinds import KINDS
from chaos.kinds.failures import ServiceFailure
from chaos.reward_service import RewardService, failure_order_file, order_failure, reward_service
from chaos.witness.journals import REFUSED, SCORED, SERVICE, read_journal
from tests.unit.rewards.http.conftest import requests_of, source_of
from tests.unit.rewards.http.fault_server import BEHAVIOURS

ONE, OTHER = [{"tokens": [1]}], [{"tokens": [2]}]


def test_an_order_is_obeyed_once_and_is_over_when_the_same_samples_were_answered_well(tmp_path):
    service, injections = RewardService(), InjectionLog(tmp_path / "injections.jsonl")
    assert service.behaviour(ONE) == "ok"
    service.serve(injections, tmp_path / "journals")
    order_failure(injections, 4, "nan")
    assert [service.behaviour(samples) for samples in (ONE, OTHER)] == ["nan", "ok"]
    assert not failure_order_file(injections).exists()
    assert [(line["event"], line["fault"]) for line in injections.read()] == [("confirmed", 4)]
    assert service.behaviour([*OTHER, *ONE]) == "ok"
    assert [(line["event"], line["fault"]) for line in injections.read()] == [("confirmed", 4), ("recovered", 4)]


def test_a_failure_is_over_although_another_request_failed_before_it_was_repeated(tmp_path):
    service, injections = RewardService(), InjectionLog(tmp_path / "injections.jsonl")
    service.serve(injections, tmp_path / "journals")
    for number, samples in ((4, ONE), (5, OTHER)):
        order_failure(injections, number, "trickle")
        assert service.behaviour(samples) == "trickle"
    assert [service.behaviour(samples) for samples in (OTHER, ONE)] == ["ok", "ok"]
    assert [line["fault"] for line in injections.read() if line["event"] == "recovered"] == [5, 4]


def test_scores_that_are_believed_are_not_asked_for_again(tmp_path):
    service, injections = RewardService(), InjectionLog(tmp_path / "injections.jsonl")
    service.serve(injections, tmp_path / "journals")
    order_failure(injections, 4, "largest")
    assert [service.behaviour(samples) for samples in (ONE, OTHER)] == ["largest", "ok"]
    assert [line["event"] for line in injections.read()] == ["confirmed", "recovered"]


def test_every_way_to_fail_is_one_of_the_server_s():
    served = {kind.behaviour for kind in KINDS.values() if isinstance(kind, ServiceFailure)}
    assert served <= {*BEHAVIOURS, "slow", "reset", "trickle"}


@pytest.mark.parametrize("behaviour", ["500", "nan", "reset"])
def test_a_source_gets_its_scores_all_the_same(tmp_path, behaviour):
    injections = InjectionLog(tmp_path / "injections.jsonl")

    async def scores(url):
        async with source_of(url, send="tokens") as source:
            return (await source.score(requests_of(3))).scores.tolist()

    with reward_service() as service:
        service.serve(injections, tmp_path / "journals")
        order_failure(injections, 1, behaviour)
        assert asyncio.run(scores(service.url)) == [0, 1, 2]
    assert [line["event"] for line in injections.read()] == ["confirmed", "recovered"]
    (line,) = read_journal(tmp_path / "journals", SERVICE)
    assert line["event"] == SCORED and line["samples"] == [[0, 7, 8], [1, 7, 8], [2, 7, 8]], "answered well once"


def test_a_prompt_that_is_refused_stays_so_and_others_have_scores(tmp_path):
    service, injections = RewardService(), InjectionLog(tmp_path / "injections.jsonl")
    service.serve(injections, tmp_path / "journals")
    refused, other, same = ([{"tokens": tokens}] for tokens in ([7, 8, 1], [7, 9, 1], [7, 8, 2]))
    order_failure(injections, 4, "400")
    assert [service.behaviour(samples) for samples in ([*refused, *other], refused, other, same)] == [
        "400", "400", "ok", "400"]
    assert [(line["event"], line.get("prompt")) for line in injections.read()] == [
        ("confirmed", "w7 w8"), ("recovered", None)]
    lines = read_journal(tmp_path / "journals", SERVICE)
    assert [(line["event"], line.get("prompt"), line.get("samples")) for line in lines] == [
        (REFUSED, [7, 8], None), (SCORED, None, [[7, 9, 1]])]
    order_failure(injections, 5, "400")
    assert service.behaviour([*same, *other]) == "400" == service.behaviour(other), "another prompt each time"
    service.serve(injections, tmp_path / "journals")
    assert service.behaviour(refused) == "ok", "another run"
