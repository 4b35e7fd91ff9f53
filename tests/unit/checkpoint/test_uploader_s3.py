"""Copies at a server that speaks S3 (moto's), over HTTP; where `s3fs` and `moto[server]` are installed."""

import socket
import subprocess
import sys
from importlib.util import find_spec

import pytest

from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.checkpoint.uploader import fetch_newest
from rlhf_ray.errors import ConfigError, UploadError
from tests.unit.checkpoint.uploads import save, uploader_of, wait_until

pytestmark = pytest.mark.skipif(not (find_spec("s3fs") and find_spec("moto")), reason="s3fs or moto is not installed")


@pytest.fixture
def bucket(monkeypatch):
    """URL of an empty bucket; its server is found by AWS's own variables, as a user's would be."""
    # In a process of its own: vLLM inspects every imported module, which fails in Flask, the server's framework.
    port = _free_port()
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: _listens(port), timeout_s=120)
    for name, value in (("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}"), ("AWS_ACCESS_KEY_ID", "test"),
                        ("AWS_SECRET_ACCESS_KEY", "test"), ("AWS_DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("training")
    yield "s3://training/runs/mine", server
    s3fs.S3FileSystem.clear_instance_cache()
    server.kill()
    server.wait()


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_a_run_goes_to_a_bucket_and_comes_back(run, bucket, quick, tmp_path):
    url, _ = bucket
    uploader = uploader_of(url, run, silence_s=30)
    uploader.start(resume=False)
    for step in (1, 2, 3):
        save(run, step)
        wait_until(lambda: uploader.step == step)  # noqa: B023
    uploader.finish()
    assert uploader.remote.steps() == [3, 2]
    assert fetch_newest(url, tmp_path / "elsewhere", lambda _: None) == 3
    found = CheckpointStore(tmp_path / "elsewhere/checkpoints", 1).latest()
    assert found.step == 3 and (found.path / "policy/rank_0.bin").read_bytes() == b"\x03" * 100_000


def test_a_bucket_that_is_not_there_is_refused(run, bucket):
    with pytest.raises(ConfigError, match=r"s3://other/runs.*cannot be written"):
        uploader_of("s3://other/runs", run).start(resume=False)


def test_a_server_that_goes_away_is_told_at_the_end(run, bucket, quick):
    url, server = bucket
    uploader = uploader_of(url, run, silence_s=60, warn=lambda _: None)
    uploader.start(resume=False)
    save(run, 1)
    wait_until(lambda: uploader.step == 1)
    server.kill()
    server.wait()
    save(run, 2)
    with pytest.raises(UploadError, match="it has the checkpoint of step 1"):
        uploader.finish()
