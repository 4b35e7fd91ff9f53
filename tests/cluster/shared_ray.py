"""One Ray cluster for all runs that this process makes itself: a run joins the cluster that it finds open. What the
starting and ending of a cluster of one's own is about is tested by runs that are processes of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from rlhf_ray.config.run import ClusterConfig, PoolConfig
from tests.cluster.processes import spared

CPUS = 8
"""Logical ones: more than any of these runs asks for."""
RAY_S_OWN = ("/gcs/gcs_server", "/raylet/raylet", "autoscaler/_private/monitor.py", "dashboard/dashboard.py",
             "_private/log_monitor.py", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "dashboard/agent.py",
             "runtime_env/agent/main.py")
"""Marks of the processes of a cluster without any worker."""
_open: list[ExitStack] = []


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[ExitStack]:
    """The cluster; `close()` ends it early, and runs of this process start their own from then on."""
    from rlhf_ray.cluster.session import ray_session

    config = ClusterConfig(dashboard=False, object_store_mb=256)
    with ExitStack() as cluster:
        cluster.enter_context(ray_session(config, {"default": PoolConfig(cpus=CPUS)}, f"tests-{os.getpid()}"))
        spared.update(RAY_S_OWN)
        cluster.callback(spared.clear)
        _open.append(cluster)
        yield cluster


def close_shared_ray() -> None:
    """End the cluster, if there is one: tests elsewhere begin with none."""
    for cluster in _open:
        cluster.close()
