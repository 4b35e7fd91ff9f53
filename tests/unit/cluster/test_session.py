"""What is known of a cluster's address before Ray tries it, and what is done about its head afterwards."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest

from rlhf_ray.cluster import session
from rlhf_ray.cluster.session import ray_session
from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.errors import ClusterError, ClusterUnavailable, ConfigError, WorkerError


@pytest.fixture
def deserted() -> Iterator[str]:
    """An address of this machine that is taken, and where nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def test_an_address_where_nobody_listens_is_refused_at_once(deserted: str) -> None:
    with (pytest.raises(ClusterError, match=f"nothing takes connections at cluster.address='{deserted}'.*ray start"),
          ray_session(ClusterConfig(address=deserted), {}, "test")):
        pass


@pytest.mark.parametrize("address", ["no-such-host.invalid:6379", "127.0.0.1:99999", ("a" * 70) + ":6379"])
def test_an_address_that_is_none_is_refused_in_words(address: str) -> None:
    with (pytest.raises(ClusterError, match="correct host and port"),
          ray_session(ClusterConfig(address=address), {}, "test")):
        pass


class Ray:
    """Stands in for the client: what is asked of it, in order."""

    def __init__(self, patch, address):
        self.events, self._address = [], address
        patch.setattr(session.ray, "init", lambda **_: self.events.append("init"))
        patch.setattr(session.ray, "shutdown", lambda: self.events.append("shutdown"))
        patch.setattr(session.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=address))
        patch.setattr(session, "_describe", lambda: None)
        patch.setattr(session, "head_watched", self._watched)

    @contextmanager
    def _watched(self, address):
        self.events.append(f"watch {address}")
        yield
        self.events.append("watch over")


@pytest.mark.parametrize("error", [WorkerError("policy_learner/0 died"), ConfigError("no such pool")])
def test_the_head_is_watched_to_the_end_of_the_shutdown_and_blamed_for_lost_workers(monkeypatch, error):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        ray = Ray(monkeypatch, address)
        with ray_session(ClusterConfig(address=address, allow_open=True), {}, "x"):
            ray.events.append("run")
        assert ray.events == ["init", f"watch {address}", "run", "shutdown", "watch over"]
        with pytest.raises(type(error)), ray_session(ClusterConfig(address=address, allow_open=True), {}, "x"):
            raise error
        wanted = ClusterUnavailable if isinstance(error, WorkerError) else ConfigError
        with (pytest.raises(wanted, match=str(error)),
              ray_session(ClusterConfig(address=address, allow_open=True), {}, "x")):
            server.close()
            raise error
    assert ray.events.count("shutdown") == 3


SLOW = Exception("The current node timed out during startup. This could happen because ...")


def test_a_local_cluster_that_starts_too_slowly_for_ray_is_started_again(monkeypatch):
    ray, attempts = Ray(monkeypatch, "127.0.0.1:1"), [SLOW, SLOW, None]

    def init(**_):
        ray.events.append("init")
        if (error := attempts.pop(0)) is not None:
            raise error

    monkeypatch.setattr(session.ray, "init", init)
    with ray_session(ClusterConfig(), {}, "x"):
        ray.events.append("run")
    assert ray.events == ["init", "shutdown", "init", "shutdown", "init", "watch 127.0.0.1:1", "run", "shutdown",
                          "watch over"]


@pytest.mark.parametrize(("error", "wanted", "words"), [
    (SLOW, ClusterUnavailable, "cannot start a local Ray cluster: .*cluster.start_timeout_s=0.01"),
    (ValueError("no such resource"), ClusterError, "cannot start a local Ray cluster: no such resource")])
def test_a_local_cluster_that_cannot_be_started_is_an_error_in_words(monkeypatch, error, wanted, words):
    Ray(monkeypatch, "127.0.0.1:1")

    def init(**_):
        time.sleep(0.02)
        raise error

    monkeypatch.setattr(session.ray, "init", init)
    with pytest.raises(wanted, match=words) as raised, ray_session(ClusterConfig(start_timeout_s=0.01), {}, "x"):
        pass
    assert type(raised.value) is wanted


RAYLET = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid, flush=True)
time.sleep(60)
"""
"""A process with one child, whose pid it prints."""


def test_processes_that_outlive_the_one_that_started_them_end_with_the_session(monkeypatch):
    """As Ray's agents do when their raylet is killed."""
    monkeypatch.setattr(session, "CLUSTER_ENDS_S", 0.2)
    raylet = subprocess.Popen([sys.executable, "-c", RAYLET], stdout=subprocess.PIPE, text=True)
    agent = psutil.Process(int(raylet.stdout.readline()))
    members = session.family([psutil.Process(raylet.pid)])
    with session.ended_with(members):
        raylet.kill()
        raylet.wait()
        assert agent.is_running()
    assert not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE


def test_agents_of_a_raylet_that_ended_before_the_shutdown_end_too(monkeypatch):
    """As a raylet does when the control service is gone: at the shutdown its agents are nobody's descendants."""
    monkeypatch.setattr(session, "CLUSTER_ENDS_S", 0.2)
    fake = Ray(monkeypatch, "127.0.0.1:1")
    begun = []

    def init(**_):
        begun.append(subprocess.Popen([sys.executable, "-c", RAYLET], stdout=subprocess.PIPE, text=True))
        begun.append(psutil.Process(int(begun[0].stdout.readline())))

    monkeypatch.setattr(session.ray, "init", init)
    with ray_session(ClusterConfig(), {}, "x"):
        raylet, agent = begun
        raylet.kill()
        raylet.wait()
    assert "shutdown" in fake.events
    assert not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE


LOCAL = ClusterConfig()


@pytest.fixture
def places(monkeypatch, tmp_path_factory):
    """A short temporary directory, a home without a token, and a disk with space."""
    short = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(session, "temporary_directory", lambda: session.Path(os.environ["RAY_TMPDIR"]))
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    monkeypatch.setenv("HOME", str(short / "home"))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(session, "new_token_file", lambda: session.Path.home() / ".ray/auth_token")
    return short


def test_directories_that_can_be_used_are(places):
    session.require_local_directories(LOCAL)
    assert (places / "home/.ray").is_dir()


@pytest.mark.parametrize(("variable", "value", "said"), [
    ("RAY_TMPDIR", "/tmp/" + "d" * 60, r"RAY_TMPDIR=/tmp/d+ is too long: .* paths of \d+ bytes, and Linux allows 107; "
     "set RAY_TMPDIR"),
    ("RAY_TMPDIR", "/proc/nope", "RAY_TMPDIR=/proc/nope cannot be written: No such file or directory; set RAY_TMPDIR"),
    ("RAY_TMPDIR", "/dev/null/x", "RAY_TMPDIR=/dev/null/x cannot be written: Not a directory; set RAY_TMPDIR"),
    ("HOME", "/proc/nope", "/proc/nope/.ray, where a local cluster keeps its token, cannot be written: No such .*; set "
     "HOME to .* or RAY_AUTH_TOKEN"),
    ("HOME", "/dev/null", "/dev/null/.ray, where a local cluster keeps its token, cannot be written: Not a directory"),
])
def test_a_directory_that_a_local_cluster_cannot_use_is_refused(places, monkeypatch, variable, value, said):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=said) as refused:
        session.require_local_directories(LOCAL)
    assert "\n" not in str(refused.value)
    session.require_local_directories(ClusterConfig(address="host:6379"))


@pytest.mark.parametrize(("hint", "line"), [
    (None, ""), ("`ray get-auth-token` prints it", "; it asks for a token: `ray get-auth-token` prints it")])
def test_the_dashboard_s_address_comes_with_the_way_in(monkeypatch, hint, line):
    monkeypatch.setattr(session, "token_hint", lambda: hint)
    assert session.Session("h:2", "http://h:1", None).dashboard_line == f"Ray dashboard at http://h:1{line}"
    assert session.Session("h:2", None, None).dashboard_line is None


def test_a_temporary_directory_that_is_full_is_refused(places, monkeypatch):
    monkeypatch.setattr(session.shutil, "disk_usage", lambda _: SimpleNamespace(free=5 * 2**20))
    with pytest.raises(ConfigError, match="RAY_TMPDIR=/tmp is on a disk with 5 MiB free, and .* needs 64 MiB"):
        session.require_local_directories(LOCAL)


@pytest.mark.parametrize(("error", "kind", "said"), [
    (OSError(28, "No space left on device"), ClusterError, "cannot start a local Ray cluster: .*No space left"),
    (Exception("\nThe last 20 lines of x.log:\n  at a\nEOFError: unexpected\n"), ClusterError,
     "cannot start a local Ray cluster: The last 20 lines of x.log: ... EOFError: unexpected$"),
    (TimeoutError("waited"), ClusterUnavailable, "cannot start a local Ray cluster: waited$"),
])
def test_whatever_keeps_a_local_cluster_from_starting_is_one_line(monkeypatch, error, kind, said):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(session.ray, "init", fail)
    with pytest.raises(kind, match=said) as raised, ray_session(LOCAL, {}, "test"):
        pass
    assert type(raised.value) is kind and "\n" not in str(raised.value)
