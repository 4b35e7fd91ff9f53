"""A server that answers as the Hugging Face Hub does where a folder is uploaded, and keeps what it is sent. It takes
every file whole, in the commit; the Hub's storage of large files is not part of it."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants
import pytest

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
            commit = {"commitUrl": f"{self.server.url}/me/mine/commit/1", "commitOid": "1" * 40, "hookOutput": ""}
            self._answer(200, commit)
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


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A server that huggingface_hub takes for the Hub, with a token that it knows."""
    server = Hub()
    threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        patch.setenv("HF_TOKEN", TOKEN)
        yield server
    server.shutdown()
    server.server_close()
