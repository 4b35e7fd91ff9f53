"""`rlhf-ray export --push-to-hub`: the upload, and what is refused before anything is exported."""

import base64

import huggingface_hub.constants
import pytest

from rlhf_ray.checkpoint import hub
from rlhf_ray.errors import UploadError
from tests.hub_server import TOKEN, hub_server


@pytest.fixture
def server():
    with hub_server() as server:
        yield server


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
