"""What `rlhf-ray serve-reward` refuses before it loads anything, and the digest by which models are told apart."""

import shutil
import socket

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForSequenceClassification

from rlhf_ray.cli.serve_reward import TOKEN_VARIABLE
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.serving import ServingConfig
from rlhf_ray.errors import ConfigError, ModelError

SECRET = "canary-0123456789abcdef"


@pytest.fixture
def serve(monkeypatch):
    """serve(*arguments) -> (exit code, stderr, configuration that would be served)."""
    import sys

    import rlhf_ray.serving.server
    from rlhf_ray.cli.main import main

    served = []
    monkeypatch.setattr(rlhf_ray.serving.server, "serve", lambda config, say: served.append(config))
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["rlhf-ray", "serve-reward", "some/model", *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, served

    return run


def test_defaults_are_for_this_machine_alone(serve):
    code, (config,) = serve()
    assert code == 0 and (config.host, config.port, config.token) == ("127.0.0.1", 8008, None)
    assert config.model == ModelConfig(path="some/model")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "scorer.lan"])
def test_an_address_that_others_reach_needs_a_token(serve, host, capsys, monkeypatch):
    code, served = serve("--host", host)
    assert code == 2 and not served and "give --token-file or set RLHF_RAY_REWARD_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv(TOKEN_VARIABLE, SECRET)
    assert serve("--host", host)[0] == 0 and served[0].token.get_secret_value() == SECRET


def test_a_reward_model_has_no_logits_in_float32():
    with pytest.raises(ConfigError, match="model.float32_head=true has no effect: the scalar head .* leave it out"):
        ServingConfig(model=ModelConfig(path="m", float32_head=True))
    assert not ServingConfig(model=ModelConfig(path="m")).model.float32_head


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1"])
def test_loopback_needs_none(serve, host):
    assert serve("--host", host)[0] == 0


@pytest.mark.parametrize(("content", "words"), [
    (None, "cannot be read"), ("  \n", "is empty"), ("short", "at least 16"), (SECRET + "\nsecond line", "printable")])
def test_a_token_file_that_will_not_do(serve, content, words, tmp_path, capsys):
    if content is not None:
        (tmp_path / "token").write_text(content)
    code, served = serve("--token-file", str(tmp_path / "token"))
    message = capsys.readouterr().err
    assert code == 2 and not served and words in message
    assert "canary" not in message and "short" not in message


def test_the_file_wins_over_the_environment_and_nothing_shows_it(serve, tmp_path, monkeypatch):
    (tmp_path / "token").write_text(SECRET + "\n")
    monkeypatch.setenv(TOKEN_VARIABLE, "another-0123456789abcdef")
    _, (config,) = serve("--token-file", str(tmp_path / "token"))
    assert config.token.get_secret_value() == SECRET
    assert SECRET not in repr(config) + str(config) + config.model_dump_json()


@pytest.mark.parametrize(("arguments", "words"), [
    (["--port=70000"], "--port: "), (["--max-queue=0"], "--max-queue: "), (["--dtype=float8"], "--dtype: "),
    (["--tls-cert=c.pem"], "tls_cert and tls_key must be set together")])
def test_options_out_of_range(serve, arguments, words, capsys):
    code, served = serve(*arguments)
    assert code == 2 and not served and words in capsys.readouterr().err


def test_a_port_in_use_and_a_certificate_that_is_none_are_told_before_loading(tmp_path):
    from rlhf_ray.config.serving import ServingConfig
    from rlhf_ray.serving.server import serve

    model = ModelConfig(path=str(tmp_path / "none"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use"):
            serve(ServingConfig(model=model, port=port), print)
    (tmp_path / "c.pem").write_text("nothing")
    with pytest.raises(ConfigError, match="cannot be used"):
        serve(ServingConfig(model=model, port=0, tls_cert=str(tmp_path / "c.pem"), tls_key=str(tmp_path / "c.pem")),
              print)
    with pytest.raises(ModelError, match="no such directory"):
        serve(ServingConfig(model=model, port=0), print)


def test_a_second_service_is_told_that_the_port_is_taken_while_the_first_still_loads():
    from rlhf_ray.config.serving import ServingConfig
    from rlhf_ray.serving.server import _listen

    model = ModelConfig(path="m")
    with _listen(ServingConfig(model=model, port=0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port}: Address already in use, another program has it"):
            _listen(ServingConfig(model=model, port=port))


def test_a_service_says_that_it_serves_once_it_answers(served_model, monkeypatch):
    from rlhf_ray.config.serving import ServingConfig
    from rlhf_ray.serving import server

    said: list[str] = []
    answered: list[bool] = []
    began = server.uvicorn.Server.startup

    async def startup(self, sockets=None):
        assert not said  # loaded, but nobody is answered yet
        await began(self, sockets)
        answered.append(self.started)
        self.should_exit = True

    monkeypatch.setattr(server, "ServedModel", lambda *_: served_model)
    monkeypatch.setattr(server.uvicorn.Server, "startup", startup)
    server.serve(ServingConfig(model=ModelConfig(path="m"), port=0), said.append)
    assert answered == [True] and [line.split()[0] for line in said] == ["serving", "schema", "stopped"]


def test_the_address_of_a_service_that_has_just_ended_is_free():
    from rlhf_ray.config.serving import ServingConfig
    from rlhf_ray.serving.server import _listen

    with socket.create_server(("127.0.0.1", 0)) as before:
        port = before.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as caller:
            before.accept()[0].close()  # the side that closes first keeps the connection's address for a minute
            assert caller.recv(1) == b""
    with _listen(ServingConfig(model=ModelConfig(path="m"), port=port)) as again:
        assert again.getsockname()[1] == port


def test_the_digest_changes_with_one_weight_the_precision_or_the_words(reward_directory, served_model, tmp_path):
    from rlhf_ray.serving.served_model import ServedModel

    def digest(directory, **settings):
        return ServedModel(ModelConfig(path=str(directory), **settings), 512).digest

    copy = shutil.copytree(reward_directory, tmp_path / "elsewhere")
    assert digest(copy) == served_model.digest
    assert digest(copy, dtype="bfloat16") != served_model.digest
    weights = load_file(copy / "model.safetensors")
    weights["score.weight"][0, 0] += 1e-6
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert digest(copy) != served_model.digest


def test_one_of_several_labels_is_served(reward_directory, tmp_path):
    from rlhf_ray.serving.schema import Sample
    from rlhf_ray.serving.served_model import ServedModel

    copy = shutil.copytree(reward_directory, tmp_path / "three")
    torch.manual_seed(0)
    model = LlamaForSequenceClassification.from_pretrained(
        copy, num_labels=3, id2label={0: "sad", 1: "neutral", 2: "glad"}, ignore_mismatched_sizes=True)
    model.save_pretrained(copy)
    tokens = [3, 9, 4, 7]
    expected = model(torch.tensor([tokens])).logits[0].tolist()
    served = {label: ServedModel(ModelConfig(path=str(copy)), 512, label) for label in ("sad", "1", "glad")}
    found = [float(one.score(one.rows([Sample(tokens=tokens)]))[0]) for one in served.values()]
    assert found == pytest.approx(expected, abs=1e-5) and len(set(found)) == 3
    assert len({one.digest for one in served.values()}) == 3
    for label, said in ((None, r"has 3 labels \(0 'sad', 1 'neutral', 2 'glad'\), .*: set --label to one of them"),
                        ("happy", "--label='happy' is not a label of .*three', which has 0 'sad'")):
        with pytest.raises(ModelError, match=said):
            ServedModel(ModelConfig(path=str(copy)), 512, label)


def test_the_option_for_the_label_is_handed_on(serve):
    assert serve("--label", "glad")[1][0].label == "glad"
