"""Ray's answer about nodes, as planning takes it."""

import pytest

from rlhf_ray.cluster import nodes
from rlhf_ray.planning.hardware import A100, H100

HEAD = {"Alive": True, "NodeID": "a" * 32, "NodeManagerHostname": "a", "NodeManagerAddress": "10.0.0.1",
        "Labels": {"ray.io/node-id": "x"}, "Resources": {
            "CPU": 4.0, "memory": 6e9, "object_store_memory": 2e9, "node:__internal_head__": 1.0, "node:10.0.0.1": 1.0}}
WORKER = {"Alive": True, "NodeID": "b" * 32, "NodeManagerHostname": "b", "NodeManagerAddress": "10.0.0.2",
          "Labels": {"ray.io/accelerator-type": "H100", "role": "policy"},
          "Resources": {"CPU": 64.0, "GPU": 8.0, "memory": 1e12, "accelerator_type:H100": 1.0, "disk": 3.0}}
GONE = {"Alive": False, "NodeID": "c" * 32, "Resources": {}}


@pytest.fixture
def read(monkeypatch):
    """read(nodes as Ray reports them, free resources by id) -> our nodes."""
    def run(answer, free=None):
        monkeypatch.setattr(nodes.ray, "nodes", lambda: answer)
        monkeypatch.setattr(nodes, "free_resources", lambda: free or {})
        return nodes.present_nodes()

    return run


def test_a_node_with_gpus(read):
    [node] = read([WORKER], {"b" * 32: {"GPU": 3.0}})
    assert (node.cpus, node.gpus, node.gpu, node.memory_bytes) == (64, 8, H100, 1e12)
    assert (node.name, node.id) == ("b (10.0.0.2, bbbbbbbb)", "b" * 32)
    assert node.labels["role"] == "policy" and node.free == {"GPU": 3.0}
    assert node.custom == {"disk": 3.0}


def test_the_kind_may_stand_among_the_resources(read):
    [node] = read([{**WORKER, "Labels": {}, "Resources": {"GPU": 1.0, "accelerator_type:A100": 1.0}}])
    assert node.gpu is A100


def test_the_object_store_is_part_of_main_memory(read):
    [node] = read([HEAD])
    assert (node.memory_bytes, node.gpus, node.gpu, node.custom) == (8e9, 0, None, {})


def test_the_head_comes_first_and_the_dead_do_not_count(read):
    assert [node.id[0] for node in read([GONE, WORKER, HEAD])] == ["a", "b"]
