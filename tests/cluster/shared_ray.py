"""One Ray cluster for all runs that this process makes itself: a run joins the cluster that it finds open. What the
starting and ending of a cluster of one's own is about is tested by runs that are processes of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rlhf_ray.config.run import ClusterConfig, PoolConfig
from tests.cluster.processes import spared

CPUS = 8
"""Logical ones: more than any of these runs asks for."""
RAY_S_OWN = ("/gcs/gcs_server", "/raylet/raylet", "autoscaler/_private/monitor.py", "dashboard/dashboard.py",
             "_private/log_monitor.py", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "dashboard/agent.py",
             "runtime_env/agent/main.py", "cluster/worker_template.py")
"""Marks of the processes of a session without any worker."""


class SharedRay:
    """The cluster, open or not."""

    def __init__(self) -> None:
        self._stack: ExitStack | None = None

    def open(self) -> None:
        """Start it, unless it is there."""
        from rlhf_ray.cluster.session import ray_session

        if self._stack is None:
            self._stack = ExitStack()
            config = ClusterConfig(dashboard=False, object_store_mb=256)
            self._stack.enter_context(ray_session(config, {"default": PoolConfig(cpus=CPUS)}, f"tests-{os.getpid()}"))
            spared.update(RAY_S_OWN)

    def close(self) -> None:
        """End it, unless it is not there."""
        if self._stack is not None:
            self._stack.close()
            self._stack = None
            spared.clear()


_cluster = SharedRay()


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[SharedRay]:
    """The cluster. Tests that ask for it, directly or not, find it open."""
    _cluster.open()
    yield _cluster
    _cluster.close()


@pytest.fixture(scope="module")
def own_ray() -> None:
    """For tests that start or join another cluster in this process: the shared one is not open meanwhile."""
    _cluster.close()


def before(item: pytest.Item) -> None:
    """Open the cluster again for a test that asks for it, where another one has closed it."""
    if "shared_ray" in item.fixturenames and "own_ray" not in item.fixturenames:  # type: ignore[attr-defined]
        _cluster.open()


def after(nextitem: pytest.Item | None) -> None:
    """End the cluster with the last test of this folder: tests elsewhere begin with none."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        _cluster.close()
