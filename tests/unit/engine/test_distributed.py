"""Meeting points of ranks, and collective questions that a process alone answers for itself."""

import socket

import torch

from rlhf_ray.engine.distributed import accelerator_environment, free_address, leave, sum_over_ranks


def test_a_free_address_can_be_listened_at():
    host, port = free_address("127.0.0.1").removeprefix("tcp://").rsplit(":", 1)
    with socket.socket() as listener:
        listener.bind((host, int(port)))


def test_addresses_name_a_protocol_and_the_host_that_others_know():
    assert free_address("10.1.2.3").startswith("tcp://10.1.2.3:")


def test_workers_without_gpus_compute_on_cpus_and_see_no_gpu():
    assert accelerator_environment(0) == {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    assert accelerator_environment(1) == {}


def test_a_process_alone_is_the_sum():
    assert sum_over_ranks(torch.tensor([1.5, 2.0], dtype=torch.float64)).tolist() == [1.5, 2.0]


def test_leaving_without_having_joined_is_no_error():
    leave()
