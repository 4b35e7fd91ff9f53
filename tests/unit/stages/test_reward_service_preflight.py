"""A reward service is asked before anything starts: servers, their model, the token, and the columns to send."""

import json

import pytest

from rlhf_ray.config.derived import derive
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.data.tokenizer import tokenizer_digest
from rlhf_ray.errors import ConfigError, DataError
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.stages.reward_preflight import check_rewards
from tests.models import make_tiny_llama
from tests.unit.rewards.http.fault_server import faulty_in_thread


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("policy") / "model", vocab=32, hidden=32, heads=1, layers=1)


@pytest.fixture
def check(policy, tmp_path):
    """check(url, **settings) looks at a run whose reward is the service."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "w5 w6", "answer": "w7"}) + "\n")

    def run(*urls, **settings):
        config = PPOConfig.model_validate({
            "model": {"path": str(policy)}, "prompts": {"path": str(prompts), "max_tokens": 8},
            "rewards": {"far": {"type": "http", "urls": urls, "request_timeout_s": 10, **settings}},
        })
        check_rewards(config, derive(config))

    return run


def test_a_service_that_is_there(check):
    with faulty_in_thread() as server:
        check(server.url, columns=["answer"])


def test_one_of_two_servers_missing(check):
    with faulty_in_thread() as server, faulty_in_thread() as gone:
        url = gone.url
    with faulty_in_thread() as server, pytest.raises(ConfigError, match=rf"'far' is not ready: {url}: Conn.*start the"):
        check(server.url, url)


def test_a_token_that_is_nowhere(check, monkeypatch):
    monkeypatch.delenv("FAR_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=r"rewards\.far\.token_variable='FAR_TOKEN' is empty"):
        check("https://scorer.example", token_variable="FAR_TOKEN")


def test_token_ids_for_another_vocabulary(check, policy):
    with faulty_in_thread() as server, pytest.raises(ConfigError, match="Set send: text"):
        check(server.url, send="tokens")


def test_token_ids_for_the_same_vocabulary(check, policy):
    from rlhf_ray.config.model import ModelConfig

    digest = tokenizer_digest(load_tokenizer(ModelConfig(path=str(policy))))
    with faulty_in_thread(tokenizer=digest) as server:
        check(server.url, send="tokens")


def test_a_column_that_the_prompts_lack(check):
    said = r"rewards\.far\.columns='label': .*prompts.jsonl, line 1 \(prompts.path\) has no such column"
    with faulty_in_thread() as server, pytest.raises(DataError, match=said):
        check(server.url, columns=["label"])
