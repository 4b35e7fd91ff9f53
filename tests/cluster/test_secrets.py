"""A run with a secret, watched from outside: where the secret may be seen, and which doors stand open meanwhile."""

import re

import pytest
from ray.dashboard.consts import DASHBOARD_METRIC_PORT

from tests.cluster.outside import SECRET

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def holding(secret, directory):
    """Files below a directory with the secret in them."""
    return [path for path in directory.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def test_a_reward_services_token_is_nowhere_to_be_seen(interrupted, resumed_outside):
    run, asked = interrupted, interrupted.server.asked
    assert resumed_outside.code == 0, resumed_outside.errors
    assert asked and all(a.headers["authorization"] == f"Bearer {SECRET}" for a in asked)
    written = {path.name for path in run.directory.rglob("*")}
    assert {"config.yaml", "report.html", "ledger.sqlite", "coordinator.json", "summary.json"} <= written
    assert any("ray::" in name for name in run.seen.names), "nothing was watched"
    assert any(run.ray_files.rglob("*.log")), "nothing was logged where the secret is looked for"
    assert holding(SECRET, run.directory) + holding(SECRET, run.ray_files) == []
    assert not [text for text in run.seen.text if SECRET in text]
    assert SECRET not in run.output + run.errors + resumed_outside.output + resumed_outside.errors


def test_the_dashboard_is_for_this_machine(interrupted):
    port = int(re.search(r"Ray dashboard at http://127\.0\.0\.1:(\d+)", interrupted.output)[1])
    assert {ip for ip, at in interrupted.seen.dashboard if at == port} == {"127.0.0.1"}
    assert {at for _, at in interrupted.seen.dashboard} <= {port, DASHBOARD_METRIC_PORT}
