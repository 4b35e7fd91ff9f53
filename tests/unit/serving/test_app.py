"""What the service answers: scores, health, and refusals that say what to do."""

import asyncio
import time

import numpy as np
import pytest
import torch

from rlhf_ray.models.classifier import EncodedRow

TOKEN = "canary-0123456789abcdef"
SAMPLES = [{"prompt": "w5 w6", "response": " w7"}, {"prompt": "w5 w6", "response": " w7", "finished": False},
           {"tokens": [9, 10, 11, 12, 13]}]


def post(samples, **more):
    async def script(client, *_):
        return await client.post("/score", json={"samples": samples, **more})

    return script


def expected(directory, tokens):
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits.item()


def test_scores_are_the_models_of_texts_and_of_tokens(asking, reward_directory, served_model):
    answer = asking(post(SAMPLES))
    assert answer.status_code == 200
    body = answer.json()
    assert set(body) == {"version", "scores", "model"} and body["model"] == served_model.digest
    rows = ([5, 6, 7, 1], [5, 6, 7], [9, 10, 11, 12, 13])  # a response that ended has the end-of-sequence token
    assert body["scores"] == pytest.approx([expected(reward_directory, row) for row in rows], abs=1e-5)
    assert all(np.float32(score) == score for score in body["scores"])


@pytest.mark.parametrize(("body", "words"), [
    ({"samples": []}, "samples: List should have at least 1 item"),
    ({"samples": [{"prompt": "w5"}]}, "samples.0: Value error, give either prompt and response, or tokens"),
    ({"samples": [{"prompt": "w5", "response": "w6", "tokens": [1]}]}, "give either prompt"),
    ({"samples": [{"tokens": []}]}, "samples.0.tokens"),
    ({"samples": [{"tokens": [-1]}]}, "samples.0.tokens.0"),
    ({"samples": [{"tokens": [1.5]}]}, "samples.0.tokens.0"),
    ({"samples": [{"tokens": [1, 64]}]}, "samples.0.tokens has id 64, but the model's vocabulary ends at 63"),
    ({"samples": [{"tokens": [1]}, {"tokens": [5] * 129}]}, "samples.1 has 129 tokens; the service takes 1 to 128"),
    ({"samples": [{"prompt": "", "response": "", "finished": False}]}, "samples.0 has 0 tokens"),
    ({"samples": [{"tokens": [1]}], "version": 2}, "version: Input should be 1"),
    ({"samples": [{"tokens": [1]}], "model": "x"}, "model: Extra inputs are not permitted"),
    ({}, "samples: Field required"),
])
def test_what_cannot_be_scored_is_refused_with_its_place(asking, body, words):
    async def script(client, *_):
        return await client.post("/score", json=body)

    answer = asking(script)
    assert answer.status_code == 422 and words in answer.json()["error"]


def test_other_columns_may_come_along(asking):
    plain, more = asking(post(SAMPLES[2:])), asking(post([{**SAMPLES[2], "metadata": {"answer": 3}}]))
    assert plain.json() == more.json()


def test_health_says_what_is_served_and_counts(asking, served_model, reward_directory):
    async def script(client, _, service):
        await client.post("/score", json={"samples": SAMPLES})
        well = await client.get("/health")
        service.stopping = True
        return well, await client.get("/health")

    well, stopping = asking(script)
    body = well.json()
    assert well.status_code == 200 and body["status"] == "ok"
    assert (body["model"], body["digest"]) == (str(reward_directory), served_model.digest)
    assert (body["requests"], body["samples"], body["forward_passes"], body["queue"]) == (1, 3, 1, 0)
    assert body["max_tokens"] == 128
    assert stopping.status_code == 503 and stopping.json()["status"] == "stopping"


def test_requests_at_the_same_time_share_passes(asking):
    async def script(client, _, service):
        answers = await asyncio.gather(*(client.post("/score", json={"samples": [{"tokens": [i, 3, 4]}]})
                                         for i in range(20)))
        return [a.json()["scores"][0] for a in answers], service

    scores, service = asking(script)
    assert service.batcher.samples == 20 and service.batcher.forward_passes < 10
    assert len(set(scores)) == 20


class Damaged:
    """A model that gives what it is told."""

    path, dtype, digest, tokenizer_digest, max_tokens = "m", "float32", "d", "t", 10

    def __init__(self, give):
        self.score = give

    def rows(self, samples):
        return [EncodedRow(np.array(s.tokens)) for s in samples]


def test_a_full_queue_is_429_with_retry_after(asking):
    def slowly(rows):
        time.sleep(0.3)
        return np.ones(len(rows), np.float32)

    async def script(client, *_):
        return await asyncio.gather(*(client.post("/score", json={"samples": [{"tokens": [1]}] * 3}) for _ in "abc"))

    answers = asking(script, max_queue=4, model=Damaged(slowly))  # one in a pass, one waits, no room for another
    full = [answer for answer in answers if answer.status_code == 429]
    assert full and all(int(answer.headers["retry-after"]) >= 1 for answer in full)
    assert "samples are queued already" in full[0].json()["error"]
    assert {answer.status_code for answer in answers} == {200, 429}


def test_more_samples_than_may_ever_wait_are_413_and_not_for_later(asking):
    answer = asking(post(SAMPLES), max_queue=2)
    assert answer.status_code == 413 and "retry-after" not in answer.headers
    assert answer.json() == {"error": "3 samples in one request; the service accepts up to 2"}


def test_a_score_that_is_no_number_is_an_error(asking):
    model = Damaged(lambda rows: np.array([np.nan if row.ids[0] == 7 else 1.0 for row in rows], np.float32))
    answer = asking(post([{"tokens": [1]}, {"tokens": [7]}]), model=model)
    assert answer.status_code == 500 and answer.json() == {"error": "the model gave nan for samples.1"}
    assert asking(post([{"tokens": [1]}]), model=model).json()["scores"] == [1.0]


def test_a_model_that_breaks_is_an_error_without_its_words(asking):
    def give(rows):
        raise RuntimeError(f"secret {TOKEN}")

    answer = asking(post([{"tokens": [1]}]), model=Damaged(give))
    assert answer.status_code == 500
    assert answer.json() == {"error": "the model failed: RuntimeError; see the service's log"}


class TestGate:
    @pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong-0123456789abcd", f"Basic {TOKEN}", TOKEN,
                                        f"Bearer {TOKEN}x"])
    def test_without_the_token_nothing_is_told(self, asking, header):
        async def script(client, *_):
            headers = {"Authorization": header} if header is not None else {}
            return [await client.get("/health", headers=headers), await client.get("/nothing", headers=headers),
                    await client.post("/score", json={"samples": SAMPLES}, headers=headers)]

        for answer in asking(script, token=TOKEN):
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert set(answer.json()) == {"error"} and TOKEN not in answer.text

    def test_with_it_everything_is(self, asking):
        async def script(client, *_):
            client.headers["Authorization"] = f"bearer {TOKEN}"
            return [(await client.get("/health")).status_code, (await post(SAMPLES)(client)).status_code]

        assert asking(script, token=TOKEN) == [200, 200]

    def test_the_documentation_is_open_and_names_no_model(self, asking, reward_directory):
        async def script(client, *_):
            return await client.get("/docs"), await client.get("/openapi.json")

        docs, schema = asking(script, token=TOKEN)
        assert docs.status_code == schema.status_code == 200
        assert set(schema.json()["paths"]) == {"/score", "/health"}
        assert str(reward_directory) not in docs.text + schema.text

    def test_a_body_over_the_limit_is_413_and_read_no_further(self, asking):
        sent = []

        async def body():
            for _ in range(100):
                sent.append(1)
                yield b" " * 1000

        async def script(client, *_):
            return await client.post("/score", content=body(), headers={"Content-Type": "application/json"})

        answer = asking(script, max_bytes=5000)
        assert answer.status_code == 413 and "5000 bytes" in answer.json()["error"]

    def test_while_stopping_what_was_accepted_is_finished_and_the_rest_refused(self, asking):
        async def script(client, gate, _):
            accepted = asyncio.create_task(client.post("/score", json={"samples": SAMPLES}))
            while not gate.under_way:
                await asyncio.sleep(0)
            gate.stopping = True
            refused = await client.post("/score", json={"samples": SAMPLES})
            drained = asyncio.create_task(gate.drained())
            answer = await accepted
            await asyncio.wait_for(drained, 1)
            return answer, refused

        answer, refused = asking(script)
        assert answer.status_code == 200 and len(answer.json()["scores"]) == 3
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert refused.json() == {"error": "the service is stopping"}
