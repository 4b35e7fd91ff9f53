"""Lookups on the Hub: what is said where it cannot be reached, how soon, and that a slow answer is waited for."""

import socket
import threading
import time
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from huggingface_hub import constants

from rlhf_ray.config.model import ArchitectureConfig, ModelConfig, NewModelConfig
from rlhf_ray.errors import ModelError
from rlhf_ray.models import hub
from rlhf_ray.models.loading import check_model_directory, load_tokenizer

CONNECT_S = 0.2


@pytest.fixture
def endpoint(monkeypatch, tmp_path):
    """endpoint(url) makes it the Hub's, without a proxy, with an empty cache; connections have `CONNECT_S`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "CONNECT_S", CONNECT_S)
    monkeypatch.setattr(hub, "getproxies", dict)
    hub._from_hub.cache_clear()

    def choose(url):
        monkeypatch.setattr(constants, "ENDPOINT", url)
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    return choose


@pytest.fixture
def silent():
    """The port of a listener whose queue is full: Linux drops what arrives, as a firewall does."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def message_of(name="somebody/model"):
    """What is said of a model on the Hub, which takes little longer than `CONNECT_S`."""
    began = time.monotonic()
    with pytest.raises(ModelError) as refused:
        check_model_directory(ModelConfig(path=name), "model")
    assert time.monotonic() - began < CONNECT_S + 1
    return str(refused.value)


class TestUnreachable:
    @pytest.fixture(autouse=True)
    def no_request(self, endpoint, monkeypatch):
        endpoint("https://hub.example")
        monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", None)

    def test_the_message_is_one_line_with_the_model_and_what_to_do(self, monkeypatch):
        def unknown(*_, **__):
            raise socket.gaierror(-2, "Name or service not known")

        monkeypatch.setattr(socket, "create_connection", unknown)
        said = message_of()
        assert said.startswith("model.path='somebody/model' is not a local directory and not in the local cache, and ")
        assert "https://hub.example cannot be reached ([Errno -2] Name or service not known). Name a local" in said
        assert "HF_HOME" in said and "HF_ENDPOINT" in said and "\n" not in said

    def test_a_network_that_drops_everything_has_a_deadline(self, endpoint, silent):
        endpoint(f"http://127.0.0.1:{silent}")
        assert "127.0.0.1" in message_of()

    def test_so_has_a_name_that_is_not_resolved(self, monkeypatch):
        def unanswered(*_, **__):
            time.sleep(1)
            raise socket.gaierror(-3, "Temporary failure in name resolution")

        monkeypatch.setattr(socket, "create_connection", unanswered)
        assert "(no connection to hub.example:443 within 0.2 s)" in message_of()

    def test_behind_a_proxy_only_the_proxy_is_connected_to(self, monkeypatch):
        monkeypatch.setattr(hub, "getproxies", lambda: {"https": "http://127.0.0.1:9"})
        assert "(by the proxy 127.0.0.1: [Errno 111] Connection refused)" in message_of()

    @pytest.mark.parametrize(("url", "reason"), [
        ("http://127.0.0.1:99999", "Port out of range"), ("http://hub..example", "label empty or too long")])
    def test_an_address_that_no_server_can_have_is_no_traceback(self, url, reason, endpoint):
        endpoint(url)
        assert reason in message_of()

    def test_the_password_of_a_mirror_is_not_printed(self, endpoint):
        endpoint("http://somebody:pass@word@127.0.0.1:9/mirror")
        said = message_of()
        assert "Hub at http://127.0.0.1:9/mirror cannot be reached" in said and "word" not in said

    def test_offline_mode_is_named(self, monkeypatch):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        assert "(TRANSFORMERS_OFFLINE is set)" in message_of()

    def test_a_model_in_the_local_cache_needs_no_hub(self, monkeypatch, tmp_path):
        (tmp_path / "config.json").write_text('{"hidden_size": 64}')
        monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: str(tmp_path / "config.json"))
        asked = []
        monkeypatch.setattr(hub, "why_unreachable", lambda: asked.append(1) or "no network")
        model = ModelConfig(path="somebody/model")
        check_model_directory(model, "model")
        assert [hub.config_from_hub(model) for _ in range(3)] == [{"hidden_size": 64}] * 3
        assert len(asked) == 1, "each time may take as long as a connection"

    def test_a_tokenizer_is_refused_as_soon(self, monkeypatch):
        monkeypatch.setattr(hub, "why_unreachable", lambda: "no network")
        model = NewModelConfig(architecture=ArchitectureConfig(), tokenizer="some/tokenizer")
        with pytest.raises(ModelError, match="^the tokenizer 'some/tokenizer' is not .* and no network$"):
            load_tokenizer(model)

    def test_a_path_is_not_looked_up(self):
        with pytest.raises(ModelError, match="no name of a model on the Hub"):
            hub.config_from_hub(ModelConfig(path="/no/such/folder"))


class TestReachable:
    @pytest.fixture
    def answers(self, endpoint):
        """Paths of the requests to a Hub that takes longer to answer than a connection may to open."""
        paths = []

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                paths.append(self.path)
                time.sleep(2 * CONNECT_S)
                body = b'{"hidden_size": 64}'
                self.send_response(200 if "known" in self.path else 404)
                self.send_header("X-Repo-Commit", "c" * 40)
                self.send_header("ETag", '"e"')
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_GET = do_HEAD

            def log_message(self, *_):
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
        endpoint(f"http://127.0.0.1:{server.server_port}")
        yield paths
        server.shutdown()
        server.server_close()

    def test_a_slow_answer_is_waited_for(self, answers):
        assert hub.config_from_hub(ModelConfig(path="somebody/known")) == {"hidden_size": 64}

    def test_a_name_that_the_hub_does_not_know_is_asked_for_once(self, answers):
        said = message_of("somebody/else")
        assert said.startswith("model.path='somebody/else' is not a local directory") and "HfHubHTTPError" in said
        assert "404" in said and "\n" not in said
        assert answers == ["/somebody/else/resolve/main/config.json"]
