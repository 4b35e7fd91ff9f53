"""Existing Ray clusters that ask for a token, and one that does not, joined as a run joins them."""

import os
import subprocess
import sys
from uuid import uuid4

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

JOIN = """
from ray.cluster_utils import Cluster
from rlhf_ray.cluster.session import ray_session
from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.errors import ClusterError

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
for allowed in (False, True):
    try:
        with ray_session(ClusterConfig(address=cluster.address, allow_open=allowed), {}, "test") as session:
            print("joined", session.address == cluster.address)
    except ClusterError as error:
        print("refused", error)
cluster.shutdown()
"""


def joining(mode, home):
    """What a process says that starts a cluster with this RAY_AUTH_MODE, reachable by others, and joins it: first as
    a run does that leaves `cluster.allow_open` alone, then with it set."""
    environment = {**os.environ, "RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": uuid4().hex, "HOME": str(home)}
    done = subprocess.run([sys.executable, "-c", JOIN], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_a_cluster_that_asks_for_a_token_is_joined(tmp_path):
    assert joining("token", tmp_path) == ["joined True", "joined True"]


def test_an_open_cluster_is_refused_unless_that_is_asked_for(tmp_path):
    refused, joined = joining("disabled", tmp_path)
    assert refused.startswith("refused ") and "has no authentication" in refused
    assert "cluster.allow_open=true" in refused and joined == "joined True"
