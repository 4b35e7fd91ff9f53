"""What metrics are called in Prometheus, and that all of them have help with a unit."""

import re

import pytest

from rlhf_ray.observability import prometheus
from rlhf_ray.observability.metric_catalogue import METRICS
from rlhf_ray.observability.prometheus import LIVE, Gauges, gauge_name, help_of, series_of


@pytest.mark.parametrize("metric, name, labels", [
    ("reward/mean", "rlhf_reward_mean", {}),
    ("time/step", "rlhf_time_step", {}),
    ("time/policy_update", "rlhf_time", {"phase": "policy_update"}),
    ("share/generator/policy_learner", "rlhf_share", {"role": "generator", "cause": "policy_learner"}),
    ("reward/component/length", "rlhf_reward_component", {"component": "length"}),
    ("reward/component/length/std", "rlhf_reward_component_std", {"component": "length"}),
    ("reward/failures/service", "rlhf_reward_failures", {"component": "service"}),
    ("reward/failed_tries/service/timeout", "rlhf_reward_failed_tries", {"component": "service", "kind": "timeout"}),
    ("eval/pass@4/rule", "rlhf_eval_pass", {"k": "4", "component": "rule"}),
    ("eval/reward", "rlhf_eval_reward", {}),
    ("eval/reward/length", "rlhf_eval_reward_component", {"component": "length"}),
    ("idle/a-b.c", "rlhf_idle_a_b_c", {}),
])
def test_a_metric_is_a_name_and_labels(metric, name, labels):
    assert series_of(metric) == (name, labels)


def test_metrics_of_one_name_have_the_same_labels():
    seen = {}
    families = ("share/a/b", "reward/component/a", "reward/failures/a", "eval/reward/a", "eval/reward", "eval/pass@1/a")
    for metric in [*METRICS, *families]:
        series = series_of(metric)
        assert seen.setdefault(series.name, tuple(series.labels)) == tuple(series.labels), metric


def test_names_are_what_prometheus_accepts_and_help_is_what_ray_takes():
    for metric in [*METRICS, *LIVE]:
        assert re.fullmatch(r"rlhf_[a-zA-Z0-9_]+", gauge_name(metric))
        assert help_of(metric).isascii() and len(help_of(metric)) > 8, metric


def test_quantities_name_their_unit():
    assert help_of("weights/publish_seconds") == "Weight publication (seconds)"
    assert help_of("share/generator/busy").endswith("(share of time)")
    assert all(live.help.unit for live in LIVE.values())


def test_what_a_step_s_row_lacks_is_zero_and_other_metrics_stay(monkeypatch):
    gauges, seen = Gauges("run"), {}
    monkeypatch.setattr(prometheus, "joined", lambda: True)
    monkeypatch.setattr(gauges, "_set", lambda series, _, value: seen.update(
        {(series.name, *series.labels.values()): value}))
    gauges.set_row({"time/step": 1.0, "share/generator/reward_scorer": 0.5, "reward/failed_tries/a/500": 7.0})
    gauges.set_row({"eval/reward": 2.0})
    assert seen["rlhf_share", "generator", "reward_scorer"] == 0.5
    gauges.set_row({"time/step": 1.0, "share/generator/busy": 1.0})
    assert seen["rlhf_share", "generator", "reward_scorer"] == 0 == seen["rlhf_reward_failed_tries", "a", "500"]
    assert seen["rlhf_eval_reward",] == 2.0
