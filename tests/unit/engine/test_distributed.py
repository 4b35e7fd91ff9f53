"""Meeting points of ranks, where they listen, and collective questions that a process alone answers for itself."""

import json
import os
import socket
import subprocess
import sys
from datetime import timedelta

import psutil
import pytest
import torch

from rlhf_ray.cluster.worker_environment import accelerator_environment, fixed_segments
from rlhf_ray.engine.distributed import free_address, leave, listen_towards, rank_store, sum_over_ranks
from rlhf_ray.errors import ClusterError
from tests.unit.engine import listening_rank

LOOPBACK = ["127.0.0.1", "::1"]
ADDRESSES = sorted({each.address for addresses in psutil.net_if_addrs().values() for each in addresses
                    if each.family is socket.AF_INET})
"""Of this machine, in IPv4: the one of loopback and others."""


def free_port(address):
    return int(address.rpartition(":")[2])


@pytest.mark.parametrize(("host", "start"), [("127.0.0.1", "tcp://127.0.0.1:"), ("::1", "tcp://[::1]:")])
def test_a_free_address_can_be_listened_at(host, start):
    address = free_address(host)
    assert address.startswith(start)
    socket.create_server((host, free_port(address)), family=socket.getaddrinfo(host, 0)[0][0]).close()


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ClusterError, match=r"listen on 192\.0\.2\.199, .*--node-ip-address"):
        free_address("192.0.2.199")


@pytest.mark.parametrize("host", LOOPBACK)
def test_the_store_listens_at_its_address_alone(host):
    before = set(listening_rank.listeners())
    store = rank_store(address := free_address(host), 0, 1, timedelta(seconds=10))
    assert set(listening_rank.listeners()) - before == {(host, free_port(address))}
    store.set("key", "value")
    assert rank_store(address, 1, 1, timedelta(seconds=10)).get("key") == b"value"


@pytest.mark.parametrize(("cuda", "nccl"), [(False, None), (True, "=lo")])
def test_a_group_on_loopback_stays_there(monkeypatch, cuda, nccl):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # so that it is restored, whatever is set
        monkeypatch.delenv(name)
    listen_towards("tcp://127.0.0.1:1", cuda)
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ.get("NCCL_SOCKET_IFNAME")) == ("lo", nccl)


def test_an_interface_that_the_user_has_set_is_kept(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    listen_towards("tcp://127.0.0.1:1", cuda=False)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib7"


@pytest.mark.slow
@pytest.mark.parametrize("host", ADDRESSES)
def test_two_ranks_listen_on_no_other_address_than_theirs(host):
    """torch's store and gloo's connections, for the group and for one made of it, as the kernel lists them. By itself
    gloo listens at the address that the machine's name resolves to, which is one of those tried."""
    address = free_address(host)
    environment = {**os.environ, **accelerator_environment(0), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    ranks = [subprocess.Popen([sys.executable, listening_rank.__file__, address, str(rank)], env=environment,
                              stdout=subprocess.PIPE, text=True) for rank in range(2)]
    found = [json.loads(rank.communicate(timeout=280)[0].splitlines()[-1]) for rank in ranks]
    assert all(listening and {at for at, _ in listening} == {host} for listening in found), found
    assert [host, free_port(address)] in found[0]


def test_workers_without_gpus_compute_on_cpus_and_see_no_gpu():
    assert accelerator_environment(0) == {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def test_memory_of_a_gpu_grows_in_place_unless_others_open_it_or_the_user_says_otherwise(monkeypatch):
    assert accelerator_environment(1) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert fixed_segments() == {"PYTORCH_ALLOC_CONF": ""}
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")
    assert accelerator_environment(1) == fixed_segments() == {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}


def test_a_process_alone_is_the_sum():
    assert sum_over_ranks(torch.tensor([1.5, 2.0], dtype=torch.float64)).tolist() == [1.5, 2.0]


def test_leaving_without_having_joined_is_no_error():
    leave()
