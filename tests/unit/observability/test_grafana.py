"""The dashboard, alerts and scrape configuration that are checked in: of this code's metrics, and sound."""

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from rlhf_ray.observability import prometheus
from rlhf_ray.observability.chart_specs import CHARTS
from rlhf_ray.observability.metric_catalogue import METRICS
from rlhf_ray.observability.prometheus import LIVE, gauge_name, series_of

ROOT = Path(__file__).parents[3] / "launch" / "monitoring"
OURS = re.compile(r"ray_rlhf_\w+")
EVALUATED = {"ray_rlhf_eval_reward", "ray_rlhf_eval_gold"}
"""Held-out metrics, which the catalogue describes by their names alone."""


SHOWN = {
    "Distance from the reference": ("ray_rlhf_kl_sequence", "short"),
    "KL coefficient": ("ray_rlhf_kl_coef", "short"),
    "Responses that ended by themselves": ("ray_rlhf_response_finished", "percentunit"),
    "Clipped updates": ("ray_rlhf_policy_clip_fraction ray_rlhf_critic_clip_fraction", "percentunit"),
    "Explained variance": ("ray_rlhf_critic_explained_variance", "percentunit"),
    "Gradient norms": ("ray_rlhf_policy_grad_norm ray_rlhf_critic_grad_norm", "short"),
    "Samples trained on": ("ray_rlhf_throughput_samples_per_second", "short"),
    "Time of each kind of work": ("ray_rlhf_time ray_rlhf_time_step", "s"),
    "Time left": ("ray_rlhf_live_steps ray_rlhf_live_step ray_rlhf_time_step", "s"),
    "Pools at work": ("ray_rlhf_live_pool_busy", "percentunit"),
    "Where roles' time goes": ("ray_rlhf_share", "percentunit"),
    "Oldest call that is not answered": ("ray_rlhf_live_oldest_call", "s"),
    "Weight publication": ("ray_rlhf_weights_publish_seconds ray_rlhf_weights_pause_seconds", "s"),
    "Generator against learner": ("ray_rlhf_rollout_logprob_gap ray_rlhf_rollout_logprob_gap_p99", "short"),
    "Weights sent": ("ray_rlhf_weights_published_mb", "mbytes"),
    "Versions behind the policy": ("ray_rlhf_live_versions_behind", "short"),
    "Experience in the object store": ("ray_rlhf_live_buffer_mb", "mbytes"),
    "Staleness": ("ray_rlhf_staleness_mean ray_rlhf_staleness_max", "short"),
    "Workers lost so far": ("ray_rlhf_live_lost_workers", "short"),
    "Time workers were missing": ("ray_rlhf_faults_seconds_down", "s"),
}
"""What a person looks for, and where it comes from: written down by hand."""
NOT_DRAWN = {"ray_rlhf_live_samples", "ray_rlhf_live_policy_version"}
"""Live metrics that others on the dashboard say already: steps, and versions behind."""
FAMILIES = ("share/", "time/", "reward/component/", "reward/failures/", "reward/failed_tries/", "eval/pass@")


def checked_in():
    """The dashboard as Grafana is given it."""
    return json.loads((ROOT / "grafana/dashboards/rlhf_ray.json").read_text())


def exported():
    """Every name that is known beforehand, as Prometheus sees it, with its labels except `run`."""
    known = {gauge_name(name): live.labels for name, live in LIVE.items()}
    known |= {series_of(name).name: tuple(series_of(name).labels) for name in METRICS}
    known |= {family.name: family.labels for family in prometheus.FAMILIES}
    known["rlhf_reward_component_std"] = ("component",)
    return {f"ray_{name}": labels for name, labels in known.items()}


def charts():
    return [panel for panel in checked_in()["panels"] if panel["type"] != "row"]


def expressions():
    return [target["expr"] for panel in charts() for target in panel["targets"]]


def test_the_dashboard_has_every_chart_of_the_report_with_its_description_axis_and_metrics():
    """Except the buffer's: the dashboard shows its live metric by state."""
    drawn = {panel["title"]: (panel["description"], panel["fieldConfig"]["defaults"]["custom"].get("axisLabel"),
                              [name for target in panel["targets"] for name in OURS.findall(target["expr"])])
             for panel in charts()}
    reported = {plan.title: (plan.healthy, plan.axis, [f"ray_rlhf_{name.replace('/', '_')}" for name in plan.metrics])
                for plan in CHARTS if plan.title != "Replay buffer"}
    assert {title: drawn.get(title) for title in reported} == reported


def test_what_a_person_looks_for_is_drawn_from_its_metric_in_its_unit():
    drawn = {panel["title"]: (" ".join(name for target in panel["targets"] for name in OURS.findall(target["expr"])),
                              panel["fieldConfig"]["defaults"]["unit"]) for panel in charts()}
    assert {title: drawn.get(title) for title in SHOWN} == SHOWN


def test_every_metric_asked_for_is_one_that_a_run_writes_and_every_live_one_is_asked_for():
    """Names as Prometheus has them are worked out anew here, from those in a run's rows."""
    rows_, live = ({f"ray_rlhf_{re.sub('[^a-zA-Z0-9]+', '_', name)}" for name in names} for names in (METRICS, LIVE))
    families = {f"ray_rlhf_{re.sub('[^a-zA-Z0-9]+', '_', name).strip('_')}" for name in FAMILIES}
    asked = {name for text in expressions() for name in OURS.findall(text)}
    assert asked - rows_ - live - families <= EVALUATED
    assert live - asked == NOT_DRAWN


def test_grafana_is_given_what_it_needs_to_read_it():
    """Of its schema: a place and a number of its own for each panel, a letter for each query, a source that exists."""
    made = checked_in()
    assert made["uid"] and made["title"] and made["schemaVersion"] >= 36
    variables = {variable["name"]: variable for variable in made["templating"]["list"]}
    assert variables["source"]["type"] == "datasource" and variables["source"]["query"] == "prometheus"
    assert re.fullmatch(r"label_values\(ray_rlhf_\w+, run\)", variables["run"]["query"]["query"])
    numbers = [panel["id"] for panel in made["panels"]]
    assert len(numbers) == len(set(numbers)) and all(isinstance(number, int) for number in numbers)
    for panel in charts():
        assert panel["type"] in ("timeseries", "stat") and panel["gridPos"].keys() == {"x", "y", "w", "h"}
        letters = [target["refId"] for target in panel["targets"]]
        assert len(letters) == len(set(letters)) > 0, panel["title"]
        for target in [panel, *panel["targets"]]:
            assert target["datasource"] == {"type": "prometheus", "uid": "${source}"}
        assert panel["fieldConfig"]["defaults"]["unit"] in ("short", "s", "mbytes", "bytes", "percentunit")


def test_queries_are_whole():
    for text in expressions():
        assert all(text.count(one) == text.count(other) for one, other in ("{}", "()", "[]")), text
        assert text.count('"') % 2 == 0, text
        matchers = [part for inside in re.findall(r"\{([^}]*)\}", text) for part in inside.split(",")]
        assert all(re.fullmatch(r'\w+(=|=~|!=|!~)"[^"]*"', part) for part in matchers), text


def test_names_in_legends_are_labels_of_what_is_asked_for():
    for panel in charts():
        for target in panel["targets"]:
            (known, *more) = [{"run", *exported().get(name, ())} for name in OURS.findall(target["expr"])]
            asked = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert asked <= known.intersection(*more), (panel["title"], target)


def test_it_has_a_row_for_each_part_of_a_run():
    named = [panel["title"] for panel in checked_in()["panels"] if panel["type"] == "row"]
    assert named == ["Run", "Learning", "Optimisation", "Throughput", "Roles", "Weights", "Buffer", "Faults"]


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
    for panel in checked_in()["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells


def test_every_chart_says_what_is_healthy_or_what_it_shows():
    assert all(panel["description"] for panel in charts() if panel["type"] == "timeseries")


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

    assert missing(checked_in(), json.loads(JSONEncoder().encode(Dashboard.from_json(checked_in())))) == []


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
