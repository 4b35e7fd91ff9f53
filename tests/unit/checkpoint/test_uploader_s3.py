"""Copies at a server that speaks S3 (moto's), over HTTP; where `s3fs` and `moto[server]` are installed."""

import pytest

from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.checkpoint.uploader import Uploader, fetch_newest
from rlhf_ray.errors import ConfigError, UploadError
from tests.unit.checkpoint.uploads import save, wait_until

pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")


@pytest.fixture
def bucket(monkeypatch):
    """URL of an empty bucket; its server is found by AWS's own variables, as a user's would be."""
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (("AWS_ENDPOINT_URL", f"http://{host}:{port}"), ("AWS_ACCESS_KEY_ID", "test"),
                        ("AWS_SECRET_ACCESS_KEY", "test"), ("AWS_DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    name = f"training-{port}"  # moto remembers buckets for as long as its process lives
    s3fs.S3FileSystem().mkdir(name)
    yield f"s3://{name}/runs/mine", server
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def test_a_run_goes_to_a_bucket_and_comes_back(run, bucket, quick, tmp_path):
    url, _ = bucket
    uploader = Uploader(url, run, silence_s=30)
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
        Uploader("s3://other/runs", run, silence_s=30).start(resume=False)


def test_a_server_that_goes_away_is_told_at_the_end(run, bucket, quick):
    url, server = bucket
    uploader = Uploader(url, run, silence_s=60, warn=lambda _: None)
    uploader.start(resume=False)
    save(run, 1)
    wait_until(lambda: uploader.step == 1)
    server.stop()
    save(run, 2)
    with pytest.raises(UploadError, match="it has the checkpoint of step 1"):
        uploader.finish()
