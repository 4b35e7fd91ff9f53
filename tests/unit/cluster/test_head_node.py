"""A cluster's head: whether it takes connections, and what is done when it does not any more."""

import socket
import subprocess
import sys
import threading

import pytest

from rlhf_ray.cluster.head_node import head_timeout_s, head_watched, is_listening, raise_for_lost_head, require_listener
from rlhf_ray.errors import ClusterError, ClusterUnavailable, ConfigError, LedgerError, RunInterrupted, WorkerError


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address_of(server):
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_an_address_answers_while_somebody_listens_there(listener):
    address = address_of(listener)
    assert is_listening(address)
    listener.close()
    assert not is_listening(address)
    with pytest.raises(ClusterUnavailable, match=f"nothing takes connections at cluster.address='{address}'") as caught:
        require_listener(address)
    assert caught.value.exit_code == 68


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "..:6379"])
def test_what_is_no_address_is_refused_for_good(address):
    with pytest.raises(ClusterError, match="correct host and port") as caught:
        require_listener(address)
    assert not isinstance(caught.value, ClusterUnavailable) and caught.value.exit_code == 1


@pytest.mark.parametrize("address", ["auto", "ray://head:10001", "local"])
def test_of_other_notations_nothing_is_known(address):
    assert is_listening(address)


def test_a_lost_head_is_told_once_after_several_probes_and_a_present_one_never(listener):
    told, lost = [], threading.Event()

    def end(message):
        told.append(message)
        lost.set()

    address = address_of(listener)
    with head_watched(address, end, timeout_s=0.05, every_s=0.02):
        assert not lost.wait(0.3)
        listener.close()
        assert lost.wait(30)
    assert len(told) == 1 and address in told[0] and "--resume" in told[0]


def test_a_head_that_is_away_for_a_moment_is_not_lost(listener, monkeypatch):
    answered = iter([True, False, False, True, False, False])
    probes, over = [], threading.Event()

    def probe(address):
        probes.append(next(answered, None))
        if probes[-1] is None:
            over.set()
            return True
        return probes[-1]

    monkeypatch.setattr("rlhf_ray.cluster.head_node.is_listening", probe)
    told = []
    with head_watched("h:1", told.append, timeout_s=0.0, every_s=0.001):
        assert over.wait(30)
    assert told == [], "three probes in a row have to fail"


@pytest.mark.parametrize(("error", "blamed"), [
    (WorkerError("policy_learner/0 died"), True), (RuntimeError("RpcError: 14"), True),
    (ConfigError("no such pool"), False), (RunInterrupted("saved"), False), (LedgerError("lost"), False)])
def test_what_workers_or_ray_failed_of_is_the_heads_loss_where_it_does_not_answer(listener, error, blamed):
    address = address_of(listener)
    raise_for_lost_head(address, error)
    listener.close()
    if blamed:
        with pytest.raises(ClusterUnavailable, match=f"{address} takes no connections, and the run failed: {error}"):
            raise_for_lost_head(address, error)
    else:
        raise_for_lost_head(address, error)


def test_it_ends_before_rays_client_would(monkeypatch):
    monkeypatch.delenv("RAY_gcs_rpc_server_reconnect_timeout_s", raising=False)
    assert head_timeout_s() == 45
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "200")
    assert head_timeout_s() == 150


def test_the_end_is_at_once_with_its_code_whatever_the_main_thread_does():
    code = ("import threading, time; from rlhf_ray.cluster.head_node import end_process; "
            "threading.Timer(0.1, end_process, ('the head is lost',)).start(); time.sleep(60)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (68, "error: the head is lost\n")


def test_the_end_does_not_wait_for_who_reads_no_messages():
    code = """
import os, threading, time
os.set_blocking(2, False)
while True:
    try:
        os.write(2, b"." * 4096)
    except BlockingIOError:
        break
os.set_blocking(2, True)
from rlhf_ray.cluster.head_node import end_process
threading.Thread(target=end_process, args=("the head is lost",), daemon=True).start()
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) as process:
        try:
            assert process.wait(50) == 68
        finally:
            process.kill()
