"""Pools against nodes that are only described: what can never be placed is told so, by node, label and amount."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_ray.config.run import PoolConfig
from rlhf_ray.planning.bundle_packing import (
    all_resources,
    arrange,
    free_resources,
    matches_labels,
    node_capacity,
    pool_capacity,
)
from rlhf_ray.planning.node_spec import Node
from rlhf_ray.planning.placement_errors import explain_shortage, nodes_table


def node(name="n", labels=None, free=None, **resources):
    return Node(name, resources, labels=labels or {}, free=resources if free is None else free)


def fit_together(pools, nodes, amounts=all_resources):
    found = arrange(pools, nodes, amounts)
    assert bool(found.missing) >= found.impossible
    return not found.missing


def keeps_the_rules(pools, nodes):
    """Whether what is arranged is within every node's amounts, labels and each pool's strategy."""
    shares = arrange(pools, nodes).shares
    for i, one in enumerate(nodes):
        if any(shares[name][i] and not matches_labels(one.labels, pool.labels) for name, pool in pools.items()):
            return False
        if sum(shares[name][i] * pool.cpus for name, pool in pools.items()) > one.resources["CPU"] + 1e-6:
            return False
    strict = {name: pool.strategy for name, pool in pools.items() if pool.strategy.startswith("STRICT")}
    return all(max(shares[name]) <= (pools[name].bundles if kind == "STRICT_PACK" else 1)
               and (kind != "STRICT_PACK" or sum(map(bool, shares[name])) <= 1) for name, kind in strict.items())


@pytest.mark.parametrize("value, wanted, agrees", [
    ("a", "a", True), ("a", "b", False), (None, "a", False),
    ("a", "!a", False), ("b", "!a", True), (None, "!a", True),
    ("a", "in(a, b)", True), ("c", "in(a, b)", False), (None, "in(a,b)", False),
    ("a", "!in(a, b)", False), ("c", "!in(a, b)", True), (None, "!in(a, b)", True),
])
def test_selectors_mean_what_they_mean_to_ray(value, wanted, agrees):
    assert matches_labels({} if value is None else {"kind": value}, {"kind": wanted}) is agrees


def test_a_node_holds_as_many_bundles_as_its_scarcest_resource_allows():
    pool = PoolConfig(cpus=2, gpus=1, resources={"fast": 0.5})
    assert node_capacity(pool, node(CPU=16, GPU=8, fast=2)) == 4
    assert node_capacity(pool, node(CPU=16, GPU=8)) == 0
    assert node_capacity(PoolConfig(cpus=0.1), node(CPU=0.3)) == 3


@pytest.mark.parametrize("strategy, room", [("PACK", 5), ("SPREAD", 5), ("STRICT_PACK", 3), ("STRICT_SPREAD", 2)])
def test_a_strategy_bounds_what_the_nodes_hold(strategy, room):
    assert pool_capacity(PoolConfig(cpus=1, strategy=strategy), [node(CPU=3), node(CPU=2), node(GPU=1)]) == room


def test_pools_that_fit_alone_may_not_fit_together():
    nodes = [node(CPU=4), node(CPU=4, labels={"kind": "big"})]
    plain, labelled = PoolConfig(bundles=2, cpus=4), PoolConfig(cpus=4, labels={"kind": "big"})
    assert fit_together({"a": plain}, nodes) and fit_together({"b": labelled}, nodes)
    assert not fit_together({"a": plain, "b": labelled}, nodes)
    assert fit_together({"a": PoolConfig(cpus=4), "b": labelled}, nodes)


def test_an_arrangement_is_found_though_the_first_that_is_tried_fails():
    nodes = [node(CPU=4), node(CPU=3)]
    assert fit_together({"a": PoolConfig(cpus=3), "b": PoolConfig(bundles=2, cpus=2)}, nodes)


def test_what_others_use_counts_where_it_is_asked_for():
    busy = [node(CPU=4, free={"CPU": 1.0})]
    assert fit_together({"a": PoolConfig(cpus=2)}, busy)
    assert not fit_together({"a": PoolConfig(cpus=2)}, busy, free_resources)


def by_trying_all(pools, nodes):
    """Whether some assignment of bundles to nodes works, tried one by one."""
    bundles = [(i, pool) for i, pool in enumerate(pools) for _ in range(pool.bundles)]
    for assignments in product(range(len(nodes)), repeat=len(bundles)):
        left, taken = [dict(n.resources) for n in nodes], {}
        for (i, pool), home in zip(bundles, assignments, strict=True):
            left[home]["CPU"] -= pool.cpus
            taken.setdefault(i, []).append(home)
        strict = all(len(set(taken[i])) == (1 if pool.strategy == "STRICT_PACK" else len(taken[i]))
                     for i, pool in enumerate(pools) if pool.strategy.startswith("STRICT"))
        labelled = all(matches_labels(nodes[node].labels, pool.labels)
                       for (_, pool), node in zip(bundles, assignments, strict=True))
        if strict and labelled and all(amounts["CPU"] > -1e-6 for amounts in left):
            return True
    return False


POOLS = st.builds(PoolConfig, bundles=st.integers(1, 2), cpus=st.sampled_from([1.0, 2.0, 3.0]),
                  strategy=st.sampled_from(["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]),
                  labels=st.sampled_from([{}, {"kind": "a"}, {"kind": "!a"}]))
NODES = st.builds(node, CPU=st.integers(0, 5), labels=st.sampled_from([{}, {"kind": "a"}]))


@settings(max_examples=150)
@given(st.lists(POOLS, min_size=1, max_size=3), st.lists(NODES, min_size=1, max_size=3))
def test_the_verdict_is_that_of_trying_all_arrangements(pools, nodes):
    found = arrange(dict(enumerate(pools)), nodes)
    assert found.impossible is not by_trying_all(pools, nodes)
    assert bool(found.missing) is found.impossible
    assert keeps_the_rules(dict(enumerate(pools)), nodes)


def test_many_bundles_on_many_nodes_are_judged_at_once():
    nodes = [node(f"n{i}", CPU=64, GPU=8) for i in range(200)]
    assert fit_together({"a": PoolConfig(bundles=800, cpus=4, gpus=1), "b": PoolConfig(bundles=90, gpus=8)}, nodes)
    assert not fit_together({"a": PoolConfig(bundles=1601, cpus=1, gpus=1)}, nodes)


NODES_OF_A_CLUSTER = [node("10.0.0.1", CPU=8, free={"CPU": 3.0}),
                      *(node(f"10.0.0.{i}", CPU=16, GPU=8, labels={"kind": "gpu"}) for i in (2, 3))]


@pytest.mark.parametrize("pool, words", [
    ({"labels": {"kind": "tpu"}}, ["labelled kind=tpu", "none of the 3 nodes", "--labels=\"kind=tpu\""]),
    ({"gpus": 16}, ["16 GPU needed, 8 on the largest node", "Set pools.p.gpus to 8 at most and raise"]),
    ({"resources": {"nvme": 1}}, ["1 nvme needed, 0 on the largest", "start nodes with nvme"]),
    ({"gpus": 8, "bundles": 3}, ["all such nodes together hold only 2", "lower pools.p.bundles to 2"]),
    ({"gpus": 1, "bundles": 3, "strategy": "STRICT_SPREAD"}, ["with one per node, the nodes hold only 2"]),
    ({"gpus": 1, "bundles": 9, "strategy": "STRICT_PACK"}, ["the largest node holds only 8"]),
    ({"cpus": 12, "labels": {"kind": "!gpu"}}, ["12 CPU needed, 8 on the largest node"]),
])
def test_what_can_never_be_placed_is_told_with_what_to_change(pool, words):
    pools = {"p": PoolConfig(**pool), "fine": PoolConfig()}
    (said,) = explain_shortage(pools, NODES_OF_A_CLUSTER, arrange(pools, NODES_OF_A_CLUSTER))
    assert said.startswith("pool 'p' asks for")
    assert [word for word in words if word not in said] == []


def test_the_table_shows_nodes_that_are_alike_once_and_what_fits_where():
    table = nodes_table({"g": PoolConfig(gpus=1, labels={"kind": "gpu"}), "c": PoolConfig(cpus=4)}, NODES_OF_A_CLUSTER)
    assert table.splitlines() == [
        "  node             labels    free of all               bundles that fit",
        "  10.0.0.1         -         3 of 8 CPU                g: other labels, c: 0 now, 2 when empty",
        "  2 like 10.0.0.2  kind=gpu  16 of 16 CPU, 8 of 8 GPU  g: 8 now, c: 4 now",
    ]
