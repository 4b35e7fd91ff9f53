"""Ray's answer about nodes, as planning takes it."""

from rlhf_ray.cluster.nodes import alive, as_node
from rlhf_ray.planning.hardware import A100, H100

HEAD = {"Alive": True, "NodeManagerHostname": "a", "NodeManagerAddress": "10.0.0.1", "NodeManagerPort": 7,
        "Labels": {"ray.io/node-id": "x"}, "Resources": {
            "CPU": 4.0, "memory": 6e9, "object_store_memory": 2e9, "node:__internal_head__": 1.0, "node:10.0.0.1": 1.0}}
WORKER = {"Alive": True, "NodeManagerHostname": "b", "NodeManagerAddress": "10.0.0.2", "NodeManagerPort": 8,
          "Labels": {"ray.io/accelerator-type": "H100", "role": "policy"},
          "Resources": {"CPU": 64.0, "GPU": 8.0, "memory": 1e12, "accelerator_type:H100": 1.0, "disk": 3.0}}
GONE = {"Alive": False, "Resources": {}}


def test_a_node_with_gpus():
    node = as_node(WORKER)
    assert (node.cpus, node.gpus, node.gpu, node.memory_bytes) == (64, 8, H100, 1e12)
    assert node.labels["role"] == "policy"
    assert node.resources == {"disk": 3.0}


def test_the_kind_may_stand_among_the_resources():
    old = {**WORKER, "Labels": {}, "Resources": {"GPU": 1.0, "accelerator_type:A100": 1.0}}
    assert as_node(old).gpu is A100


def test_the_object_store_is_part_of_main_memory():
    node = as_node(HEAD)
    assert (node.memory_bytes, node.gpus, node.gpu) == (8e9, 0, None)


def test_the_head_comes_first_and_the_dead_do_not_count():
    assert alive([GONE, WORKER, HEAD]) == [HEAD, WORKER]
