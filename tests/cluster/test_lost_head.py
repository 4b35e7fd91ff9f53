"""A driver whose cluster loses its head ends with a code that is retried, before Ray's client ends it with 1."""

import re
import signal
import subprocess
import sys

import psutil
import pytest

from rlhf_ray.errors import ClusterUnavailable
from tests.cluster.ray_head import ray_head

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

DRIVER = """
import sys, time
import ray
from rlhf_ray.cluster.session import ray_session
from rlhf_ray.config.run import ClusterConfig

with ray_session(ClusterConfig(address=sys.argv[1], allow_open=True), {}, "tiny"):
    print("joined", flush=True)
    time.sleep(120)
"""


def lose(head):
    """(exit code, errors, address) of a driver whose head is killed; None where Ray did not let it join.

    On a busy machine a node may end itself soon after its start, since its own parts are late.
    """
    family = [p for p in psutil.process_iter(["name", "cmdline"])  # of processes of others, both may be None
              if head.environment["HOME"] in " ".join(p.info["cmdline"] or [])]
    words = " ".join(word for p in family for word in p.info["cmdline"])
    (gcs,) = (p for p in family if p.info["name"] == "gcs_server")
    address = re.search(r"--gcs-address=(\S+)", words).group(1)
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, address], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**head.environment, "RAY_AUTH_MODE": "token", "RAY_gcs_rpc_server_reconnect_timeout_s": "40"})
    try:
        if driver.stdout.readline() != "joined\n":
            return None
        gcs.send_signal(signal.SIGKILL)
        gcs.wait(10)
        _, errors = driver.communicate(timeout=120)
    finally:
        driver.kill()
    return driver.returncode, errors, address


def test_a_driver_without_its_head_ends_with_the_code_of_its_loss():
    for _ in range(3):
        with ray_head(cpus=2) as head:
            if (lost := lose(head)) is not None:
                break
    code, errors, address = lost
    assert code == ClusterUnavailable.exit_code, errors
    assert f"the head of the Ray cluster at {address} has not taken a connection for" in errors
