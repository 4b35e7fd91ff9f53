"""`rlhf-ray serve-reward` as real processes: the scores of the local reward model, shared work, and how it ends."""

import asyncio
import signal
import time

import httpx
import numpy as np
import psutil
import pytest

from rlhf_ray.config.load import load
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.rewards import HTTPReward
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import RewardError
from rlhf_ray.models.classifier import EncodedRow
from rlhf_ray.observability.metrics import read_metrics
from rlhf_ray.records import SampleKey
from rlhf_ray.rewards.http.source import HTTPSource
from rlhf_ray.rewards.protocol import RewardRequest
from tests.cluster.conftest import SMALL, VOCAB
from tests.cluster.service import services

TOKEN = "canary-0123456789abcdef"
pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(files):
    """A random reward model, of the policy's tokenizer."""
    return files.reward


@pytest.fixture(scope="module")
def token_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("secret") / "token"
    path.write_text(TOKEN)
    return path


@pytest.fixture(scope="module")
def pair(model, token_file):
    """Two services of the same model; requests linger 20 ms. The last test that uses them ends them."""
    options = ("--token-file", token_file, "--linger-ms", 20)
    with services((model, *options), (model, *options)) as running:
        yield running


def requests(count, seed=0):
    """Random prompts and responses as text and as the same tokens."""
    rng, made = np.random.default_rng(seed), []
    for i in range(count):
        tokens = rng.integers(2, VOCAB, rng.integers(4, 40)).astype(np.int32)
        finished, split = bool(rng.integers(2)), 2
        words = [f"w{t}" for t in tokens]
        tokens = np.append(tokens, np.int32(1)) if finished else tokens
        mask = np.arange(len(tokens)) >= split
        prompt, response = " ".join(words[:split]), "".join(f" {word}" for word in words[split:])
        made.append(RewardRequest(SampleKey(0, i, 0), prompt, response, tokens, mask,
                                  "stop" if finished else "length", {}))
    return made


def local_scores(model, asked):
    """[N] what the model gives to each sample alone."""
    from rlhf_ray.serving.served_model import ServedModel

    served = ServedModel(ModelConfig(path=str(model)), 1024)
    return np.array([served.score([EncodedRow(r.tokens)])[0] for r in asked])


def asking(urls, work, **settings):
    """What work(source) returns."""
    async def run():
        config = HTTPReward.model_validate({"type": "http", "urls": urls, **settings})
        source = HTTPSource("quality", config)
        await source.check()
        await source.start()
        try:
            return await work(source)
        finally:
            await source.stop()

    return asyncio.run(run())


def test_two_services_share_the_work_and_give_the_local_models_scores(pair, model, token_file):
    asked, urls = requests(200), [service.url for service in pair]

    async def work(source):
        return await asyncio.gather(source.score(asked[:120]), source.score(asked[120:]))

    settings = {"token_file": str(token_file), "batch_size": 4}
    expected = local_scores(model, asked)
    for send in ("text", "tokens"):
        answers = asking(urls, work, send=send, **settings)
        scores = np.concatenate([a.scores for a in answers])
        # In company, a row's float32 sums may be cut elsewhere than alone: the last bits differ, as with micro-batches.
        assert scores == pytest.approx(expected, abs=1e-5) and len(np.unique(scores)) == 200
        assert [a.failures for a in answers] == [0, 0]
    healths = [service.health(TOKEN) for service in pair]
    assert sum(h["samples"] for h in healths) == 400 and sum(h["requests"] for h in healths) == 100
    assert min(h["requests"] for h in healths) >= 25
    assert all(h["forward_passes"] < h["requests"] / 1.5 for h in healths), healths
    with pytest.raises(RewardError, match=r"401.*check the token"):
        asking(urls, work)


def test_a_sample_alone_has_the_same_score_bit_for_bit_whichever_service_is_asked(pair, model, token_file):
    asked = requests(12, seed=2)

    async def work(source):
        return [(await source.score([request])).scores[0] for request in asked]

    one, other = (asking([service.url], work, token_file=str(token_file)) for service in pair)
    assert np.array_equal(one, other)
    # The test's own process may cut its sums among another number of threads.
    assert one == pytest.approx(local_scores(model, asked), abs=1e-5)


def test_a_run_asks_the_services_for_each_sample_once(pair, files, configure, token_file, tmp_path):
    """Beside the same model in the run's own process, which says what the services must have said."""
    from rlhf_ray.stages import ppo

    before = sum(service.health(TOKEN)["samples"] for service in pair)
    far = {"type": "http", "urls": [s.url for s in pair], "token_file": str(token_file), "send": "tokens"}
    rewards = {"main": {"type": "model", "path": str(files.reward), "weight": 0.5}, "far": {**far, "weight": 0.5}}
    sections = {**SMALL, "rewards": rewards, "run": {"steps": 2}, "checkpoint": {"every": 0}}
    ppo.run(load(PPOConfig, configure(tmp_path / "run", **sections), []))
    rows = [row for row in read_metrics(tmp_path / "run") if "reward/mean" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["reward/component/far"] == pytest.approx(row["reward/component/main"], abs=1e-5)
        assert row["reward/mean"] == pytest.approx(row["reward/component/main"], abs=1e-5)
        assert row["reward/failures/far"] == 0
    evaluations = 2  # of one sample, before and after
    assert sum(service.health(TOKEN)["samples"] for service in pair) - before == 2 * 16 + evaluations
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert written and not [path for path in written if TOKEN.encode() in path.read_bytes()]


def test_one_service_killed_on_the_way_loses_and_doubles_nothing(pair, model, token_file):
    asked = requests(400, seed=1)

    async def work(source):
        scoring = asyncio.create_task(source.score(asked))
        while pair[0].health(TOKEN)["requests"] < 5:
            await asyncio.sleep(0.01)
        pair[0].signal(signal.SIGKILL)
        await asyncio.to_thread(pair[0].wait)
        assert not scoring.done(), "the kill came too late to be one on the way"
        return await scoring

    answer = asking([s.url for s in pair], work, token_file=str(token_file), batch_size=2)
    assert answer.scores == pytest.approx(local_scores(model, asked), abs=1e-5)
    assert answer.failure_kinds.get("connection", 0) + answer.failure_kinds.get("truncated", 0) >= 1
    assert 0 < answer.failures < 400
    assert pair[1].health(TOKEN)["samples"] >= 200
    assert TOKEN not in " ".join(psutil.Process(pair[1].pid).cmdline())
    pair[1].signal(signal.SIGINT)
    assert pair[1].wait() == 0
    assert "SIGINT: finishing 0 requests" in pair[1].output and TOKEN not in pair[0].output + pair[1].output


def test_a_stop_finishes_what_was_accepted_and_refuses_the_rest(model):
    body = {"samples": [{"tokens": [3, 4, 5]}]}
    with services((model, "--linger-ms", 1000)) as (service,):
        async def run():
            async with httpx.AsyncClient(base_url=service.url, trust_env=False, timeout=20) as client:
                accepted = asyncio.create_task(client.post("/score", json=body))
                await asyncio.sleep(0.3)
                assert not accepted.done()
                service.signal(signal.SIGTERM)
                await asyncio.sleep(0.2)
                refused, health = await client.post("/score", json=body), await client.get("/health")
                return await accepted, refused, health

        accepted, refused, health = asyncio.run(run())
        assert accepted.status_code == 200 and len(accepted.json()["scores"]) == 1
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert health.status_code == 503 and health.json()["status"] == "stopping"
        assert service.wait() == 0
        assert "SIGTERM: finishing 1 requests" in service.output
        assert "stopped after 1 requests, 1 samples, 1 forward passes" in service.output


def test_a_second_signal_does_not_wait(model):
    with services((model, "--linger-ms", 1000)) as (service,):
        async def run():
            async with httpx.AsyncClient(base_url=service.url, trust_env=False, timeout=20) as client:
                asking = asyncio.create_task(client.post("/score", json={"samples": [{"tokens": [3]}]}))
                await asyncio.sleep(0.2)
                began = time.monotonic()
                for _ in range(2):
                    service.signal(signal.SIGINT)
                    await asyncio.sleep(0.1)
                code = await asyncio.to_thread(service.wait)
                return (await asyncio.gather(asking, return_exceptions=True))[0], code, time.monotonic() - began

        answer, code, seconds = asyncio.run(run())
        assert isinstance(answer, httpx.TransportError) or answer.status_code == 500
        assert code == 130 and seconds < 10
