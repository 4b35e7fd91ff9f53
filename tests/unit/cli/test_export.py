"""`rlhf-ray export --push-to-hub` against a server that answers as the Hub does, and keeps what it is sent. It takes
every file whole, in the commit; the Hub's storage of large files is not part of this."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants
import pytest

from rlhf_ray.checkpoint import hub
from rlhf_ray.errors import UploadError

TOKEN = "hf_" + "secret" * 5


class Hub(ThreadingHTTPServer):
    """Repositories by name: whether they are private, and their files."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories = {}
        self.commits = []
        self.writable = True
        self.fails = False


class Answers(BaseHTTPRequestHandler):
    """The endpoints that an upload asks."""

    server: Hub

    def do_GET(self):
        """Who asks, whether there is a repository, and whether it may be written to."""
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid username or password."})
        elif self.path == "/api/whoami-v2":
            self._answer(200, {"type": "user", "name": "me", "auth": {"accessToken": {"role": "write"}}})
        elif self.path.endswith("/auth-check/write"):
            self._answer(200 if self.server.writable else 403, {})
        elif (name := self.path.removeprefix("/api/models/").split("/revision")[0]) in self.server.repositories:
            self._answer(200, {"id": name, "private": self.server.repositories[name], "siblings": [], "sha": "0" * 40})
        else:
            self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})

    def do_POST(self):
        """A new repository, how each file is to be sent, and a commit."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.server.repositories.setdefault(name, asked.get("visibility") == "private")
            self._answer(200, {"url": f"{self.server.url}/{name}"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            self._answer(200, {"files": [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                                         for each in files]})
        elif "/commit/" in self.path and self.server.fails:
            self._answer(403, {"error": "Storage limit reached"})
        elif "/commit/" in self.path:
            self.server.commits.append([json.loads(line) for line in body.splitlines()])
            self._answer(200, {"commitUrl": f"{self.server.url}/me/mine/commit/1", "commitOid": "1" * 40, "hookOutput": ""})
        else:
            self._answer(200, {})

    def _answer(self, status, content, headers=None):
        text = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(text)),
                            **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        """Nothing."""


@pytest.fixture
def server(monkeypatch):
    server = Hub()
    threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "adapter").mkdir()
    for name in ("README.md", "model.safetensors", "adapter/adapter_config.json"):
        (tmp_path / name).write_text(f"the bytes of {name}")
    return tmp_path


def test_a_folder_is_uploaded_to_a_repository_that_is_made(server, folder, capsys):
    name = hub.check_push("mine", private=True)
    assert name == "me/mine" and not server.repositories
    assert hub.push(folder, name, True, "step 2 of 9", print) == f"{server.url}/me/mine"
    assert server.repositories == {"me/mine": True}
    header, *files = server.commits[0]
    assert header["value"]["summary"].startswith("step 2 of 9")
    sent = {each["value"]["path"]: base64.b64decode(each["value"]["content"]).decode() for each in files}
    assert sent == {name: f"the bytes of {name}"
                    for name in ("README.md", "model.safetensors", "adapter/adapter_config.json")}
    written = capsys.readouterr()
    assert "uploading 3 files, 0.0 MB, to me/mine\n" in written.out and TOKEN not in written.out + written.err


def test_an_upload_that_fails_says_where_the_model_is(server, folder):
    server.fails = True
    with pytest.raises(UploadError, match=rf"upload to me/mine failed: .*upload me/mine {folder}$") as caught:
        hub.push(folder, "me/mine", False, "step 2", print)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(("arguments", "prepare", "said"), [
    (["--push-to-hub=a/b/c"], {}, "is no name of a repository"),
    (["--push-to-hub=me/mine"], {"offline": True}, "HF_HUB_OFFLINE is set; unset it, or leave --push-to-hub out"),
    (["--push-to-hub=me/mine"], {"token": None}, "there is none; run `hf auth login`, or set HF_TOKEN"),
    (["--push-to-hub=me/mine"], {"token": "hf_old"}, "the token may write there (`hf auth whoami`, `hf auth login`)"),
    (["--push-to-hub=me/there"], {"writable": False}, "HfHubHTTPError: "),
    (["--push-to-hub=there", "--private"], {}, "me/there is there already and public"),
    (["--private"], {}, "add --push-to-hub OWNER/NAME"),
])
def test_what_could_not_be_uploaded_is_refused_before_the_export(server, arguments, prepare, said, command_line,
                                                                 monkeypatch, tmp_path):
    server.repositories["me/there"] = False
    server.writable = prepare.get("writable", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", prepare.get("offline", False))
    if "token" in prepare:
        monkeypatch.setattr(huggingface_hub, "get_token", lambda: prepare["token"])
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
        monkeypatch.setenv("HF_TOKEN", prepare["token"] or "")
    outcome = command_line("export", "no/such/run", *arguments)  # whose absence would be the error otherwise
    assert outcome.code == 2 and said in outcome.err and TOKEN not in outcome.err
