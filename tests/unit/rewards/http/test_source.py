"""What a service is asked, how several servers share the work, and what is refused before a run starts."""

import asyncio
from dataclasses import replace

import pytest

from rlhf_ray.errors import RewardError
from rlhf_ray.rewards.http.circuit_breaker import FAILURES, Breaker
from tests.unit.rewards.http import fault_server
from tests.unit.rewards.http.conftest import requests_of, source_of
from tests.unit.rewards.http.fault_server import faulty


def asked(**settings):
    """The requests that a server sees when five samples are scored."""
    async def run():
        async with faulty() as server, source_of(server.url, **settings) as source:
            answer = await source.score(requests_of(5))
            return answer, server.asked

    return asyncio.run(run())


def test_texts_are_sent_in_batches_and_put_together_in_order():
    answer, requests = asked(batch_size=2)
    assert answer.scores.tolist() == [0, 1, 2, 3, 4]
    assert (answer.failures, answer.failure_kinds) == (0, {})
    assert sorted(len(r.samples) for r in requests) == [1, 2, 2]
    first = min(requests, key=lambda r: r.samples[0]["prompt"])
    assert first.samples == [{"prompt": "Question 0", "response": "Answer 0", "finished": False},
                             {"prompt": "Question 1", "response": "Answer 1", "finished": True}]


def test_chat_messages_go_along_with_the_text():
    async def run():
        async with faulty() as server, source_of(server.url) as source:
            plain = requests_of(1)[0]
            await source.score([replace(plain, messages=[{"role": "user", "content": "hello"}])])
            return server.asked[0].samples

    ((sample,)) = asyncio.run(run())
    assert sample["messages"] == [{"role": "user", "content": "hello"}] and sample["prompt"] == "Question 0"


def test_tokens_are_sent_where_asked_for():
    answer, requests = asked(send="tokens")
    assert answer.scores.tolist() == [0, 1, 2, 3, 4]
    assert requests[0].samples[:2] == [{"tokens": [0, 7, 8]}, {"tokens": [1, 7, 8]}]


def test_named_columns_go_along_and_no_others():
    _, requests = asked(columns=["answer"])
    assert [s["metadata"] for s in requests[0].samples] == [{"answer": str(i)} for i in range(5)]


def test_a_column_that_is_no_json_is_an_error_that_names_it():
    async def run():
        async with faulty() as server, source_of(server.url, columns=["answer"]) as source:
            requests = requests_of(1)
            requests[0].metadata["answer"] = object()
            await source.score(requests)

    with pytest.raises(RewardError, match=r"rewards\.quality\.columns=\['answer'\] .* cannot be sent as JSON"):
        asyncio.run(run())


def test_servers_share_the_work_by_what_is_under_way():
    async def run():
        async with faulty() as one, faulty() as two, source_of(one.url, two.url, batch_size=1) as source:
            answer = await source.score(requests_of(40))
            return answer.scores.tolist(), len(one.asked), len(two.asked)

    scores, one, two = asyncio.run(run())
    assert scores == list(range(40))
    assert one + two == 40 and min(one, two) >= 12


def test_a_slow_server_gets_less(monkeypatch):
    monkeypatch.setattr(fault_server, "SLOW_S", 1.0)

    async def run():
        async with (faulty(["slow"]) as slow, faulty() as quick,
                    source_of(slow.url, quick.url, batch_size=1) as source):
            await source.score(requests_of(60))
            return len(slow.asked), len(quick.asked)

    slow, quick = asyncio.run(run())
    assert slow + quick == 60 and quick > slow


def test_a_server_that_fails_again_and_again_is_left_out_and_comes_back():
    async def run():
        async with (faulty(["500"] * 5) as sick, faulty() as well,
                    source_of(sick.url, well.url, batch_size=1, retries=20) as source):
            answer = await source.score(requests_of(60))
            failed = len(sick.asked)
            await asyncio.sleep(0.15)
            again = await source.score(requests_of(20))
            return answer, failed, again, len(sick.asked)

    answer, failed, again, at_last = asyncio.run(run())
    assert answer.scores.tolist() == list(range(60)) and answer.failure_kinds == {"http_500": 5}
    assert again.failures == 0 and at_last > failed


def test_a_breaker_opens_tries_and_closes():
    breaker = Breaker()
    for _ in range(FAILURES):
        assert breaker.wait(0) == 0
        breaker.begin()
        breaker.failed(0)
    pause = breaker.wait(0)
    assert pause > 0 and breaker.wait(pause) == 0
    breaker.begin()
    assert breaker.wait(pause) == float("inf")  # one try at a time
    breaker.failed(pause)
    assert breaker.wait(pause) == pytest.approx(2 * pause)
    breaker.begin()
    breaker.succeeded()
    assert breaker.wait(0) == 0


def test_a_rest_is_no_failure():
    breaker = Breaker()
    breaker.rest(5)
    assert breaker.wait(2) == 3 and breaker.wait(5) == 0


class TestStart:
    def check(self, *healths, tokenizer=None, digests=("d1", "d1"), **settings):
        from rlhf_ray.config.rewards import HTTPReward
        from rlhf_ray.rewards.http.source import HTTPSource

        async def run():
            async with faulty(health=healths[0], digest=digests[0]) as one, \
                    faulty(health=healths[1], digest=digests[1]) as two:
                config = HTTPReward.model_validate(
                    {"type": "http", "urls": [one.url, two.url], "request_timeout_s": 20, **settings})
                await HTTPSource("quality", config).check(tokenizer)

        asyncio.run(run())

    def test_all_servers_must_be_there(self):
        self.check("ok", "ok")
        with pytest.raises(RewardError, match=r"'quality' is not ready: http://127.0.0.1:\d+: it answers 500"):
            self.check("ok", "500")

    @pytest.mark.parametrize("health", ["404", "redirect", "bad_json", "list", "html"])
    def test_what_is_no_health_is_told(self, health):
        with pytest.raises(RewardError, match=r"must answer GET /health with 200 and JSON"):
            self.check("ok", health)

    def test_they_must_serve_one_model(self):
        with pytest.raises(RewardError, match=r"serve different models \(http://\S+ serves d1, http://\S+ serves d2\)"):
            self.check("ok", "ok", digests=("d1", "d2"))

    def test_token_ids_need_the_policys_tokenizer(self):
        self.check("ok", "ok", tokenizer="t1", send="tokens")
        self.check("ok", "ok", tokenizer="t2")
        with pytest.raises(RewardError, match="Set send: text"):
            self.check("ok", "ok", tokenizer="t2", send="tokens")

    def test_a_worker_starts_while_one_server_is_there(self):
        async def run():
            async with faulty() as one, faulty(health="500") as two, source_of(one.url, two.url) as source:
                return (await source.score(requests_of(2))).scores.tolist()

        assert asyncio.run(run()) == [0, 1]

    def test_nobody_there(self):
        async def run():
            async with faulty() as gone:
                url = gone.url
            async with source_of(url):
                pass

        with pytest.raises(RewardError, match=r"is not ready: .*Connect.*rlhf-ray serve-reward"):
            asyncio.run(run())
