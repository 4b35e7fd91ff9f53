"""The dashboard, alerts and scrape configuration that are checked in: of this code's metrics, and sound."""

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from rlhf_ray.observability.grafana import COLUMNS, dashboard, rows
from rlhf_ray.observability.series import exported

ROOT = Path(__file__).parents[3] / "launch" / "monitoring"
OURS = re.compile(r"ray_rlhf_\w+")
EVALUATED = {"ray_rlhf_eval_reward", "ray_rlhf_eval_gold"}
"""Held-out metrics, which the catalogue describes by their names alone."""


def expressions():
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]


def test_the_dashboard_that_is_checked_in_is_the_one_that_the_code_makes():
    made = json.loads((ROOT / "grafana/dashboards/rlhf_ray.json").read_text())
    assert made == dashboard(), "make monitoring"


def test_it_has_a_row_for_each_part_of_a_run():
    named = [panel["title"] for panel in dashboard()["panels"] if panel["type"] == "row"]
    assert named == list(rows())
    assert {"Learning", "Throughput", "Roles", "Weights", "Buffer", "Faults"} <= set(named)


def test_dashboard_and_alerts_ask_for_metrics_that_runs_export():
    alerts = yaml.safe_load((ROOT / "alerts.yml").read_text())["groups"][0]["rules"]
    asked = {name for text in [*expressions(), *(rule["expr"] for rule in alerts)] for name in OURS.findall(text)}
    assert asked > {"ray_rlhf_kl_sequence", "ray_rlhf_live_pool_busy"}
    assert asked - set(exported()) <= EVALUATED


def test_labels_that_are_asked_for_are_those_that_a_metric_has():
    for text in expressions():
        for name, inside in re.findall(r"(ray_rlhf_\w+)\{([^}]*)\}", text):
            asked = set(re.findall(r"(\w+)=", inside)) - {"run"}
            assert asked <= set(exported().get(name, ())), text


def test_every_query_is_of_the_chosen_runs():
    assert all('run=~"$run"' in text for text in expressions())


def test_panels_lie_beside_each_other_on_the_grid():
    taken = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < COLUMNS, panel["title"]
        taken |= cells


def test_every_chart_says_what_is_healthy_or_what_it_shows():
    assert all(panel["description"] for panel in dashboard()["panels"] if panel["type"] == "timeseries")


def test_every_alert_is_tried():
    rules = yaml.safe_load((ROOT / "alerts.yml").read_text())["groups"][0]["rules"]
    tried = yaml.safe_load((ROOT / "alerts_test.yml").read_text())["tests"]
    raised = {case["alertname"] for test in tried for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert raised == {rule["alert"] for rule in rules}


def test_prometheus_keeps_our_metrics():
    [job] = yaml.safe_load((ROOT / "prometheus.yml").read_text())["scrape_configs"]
    [keep] = job["metric_relabel_configs"]
    assert all(re.fullmatch(keep["regex"], name) for name in exported())
    assert not re.fullmatch(keep["regex"], "ray_grpc_server_req_new_total")


@pytest.mark.skipif(importlib.util.find_spec("grafana_foundation_sdk") is None, reason="Grafana's SDK is not installed")
def test_grafanas_own_models_read_the_dashboard_and_lose_nothing():
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    assert missing(dashboard(), json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard())))) == []


def missing(ours, theirs, path=""):
    """Where `theirs` lacks something of ours."""
    if isinstance(ours, dict):
        return [place for key, value in ours.items()
                for place in (missing(value, theirs[key], f"{path}/{key}") if key in theirs else [f"{path}/{key}"])]
    if isinstance(ours, list) and len(ours) == len(theirs):
        return [place for i, value in enumerate(ours) for place in missing(value, theirs[i], f"{path}/{i}")]
    return [] if ours == theirs else [path]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not installed")
@pytest.mark.parametrize("arguments", [("check", "config", "prometheus.yml"), ("test", "rules", "alerts_test.yml")])
def test_promtool_finds_nothing_wrong(arguments):
    done = subprocess.run(["promtool", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
