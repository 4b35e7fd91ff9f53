"""What a metric is called in Prometheus: a name, labels, and a sentence of help with the unit.

A row's metrics carry roles and components in their names (`share/generator/busy`); a query wants these as labels. What
changes between two rows as well, the live metrics, is listed here with its labels.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from rlhf_ray.observability.catalogue import METRICS, Metric, describe


class Series(NamedTuple):
    """One time series, or all of a name where the labels say nothing."""

    name: str
    """As Ray exports it, but for `ray_` in front."""
    labels: dict[str, str]


class Family(NamedTuple):
    """Metrics of a row that are one name in Prometheus, told apart by labels."""

    prefix: str
    labels: tuple[str, ...]
    help: Metric
    called: str = ""
    """In Prometheus, where the prefix would be another metric's name."""

    @property
    def name(self) -> str:
        """In Prometheus."""
        return gauge_name(self.called or self.prefix.rstrip("/@"))


FAMILIES = (
    Family("share/", ("role", "cause"), Metric("What a role's workers did or waited for in the step", "share of time")),
    Family("time/", ("phase",), Metric("Time in which a kind of work was under way in the step", "seconds")),
    Family("reward/component/", ("component",), Metric("A component of the reward, mean before its weight",
                                                      "reward units")),
    Family("reward/failures/", ("component",), Metric("Responses not judged in the ordinary way", "share")),
    Family("reward/failed_tries/", ("component", "kind"), Metric("Tries without an answer that could be used",
                                                                "a step")),
    Family("eval/reward/", ("component",), Metric("A component of the held-out reward, mean before its weight",
                                                 "reward units"), "eval/reward_component"),
    Family("eval/pass@", ("k",), Metric("Held-out prompts solved by one of k samples", "share of prompts")),
)
ALONE = ("time/step",)
"""Metrics with a family's prefix that are not like the others."""


class Live(NamedTuple):
    """A metric that is written every few seconds, whether a step ends or not."""

    labels: tuple[str, ...]
    help: Metric


LIVE: dict[str, Live] = {
    "live/step": Live((), Metric("Updates made so far", "steps")),
    "live/steps": Live((), Metric("Updates that the run will make", "steps")),
    "live/samples": Live((), Metric("Samples trained on so far", "samples")),
    "live/step_age": Live((), Metric("Time since the last update ended, or the run began", "seconds")),
    "live/workers": Live(("role", "pool", "state"), Metric("Workers that are busy, idle or down", "workers")),
    "live/pool_busy": Live(("pool",), Metric("Workers of a pool that had work, mean of the last minute", "share")),
    "live/oldest_call": Live(("role",), Metric("Age of the oldest call that is not answered", "seconds")),
    "live/buffer": Live(("state",), Metric("Places of the replay buffer: under way, ready or training", "samples")),
    "live/buffer_mb": Live((), Metric("Experience held in the object store", "MiB")),
    "live/policy_version": Live((), Metric("Version of the policy under training", "weight version")),
    "live/versions_behind": Live(("worker",), Metric("Versions that a generator is behind the policy",
                                                     "weight versions")),
    "live/quarantined": Live((), Metric("Samples left out so far, for want of a score", "samples")),
    "live/lost_workers": Live((), Metric("Workers lost so far in this process", "workers")),
}


def series_of(metric: str) -> Series:
    """The series of a row's metric: `time/generate` is `rlhf_time{phase="generate"}`."""
    if metric not in ALONE:
        for family in FAMILIES:
            if metric.startswith(family.prefix):
                return _member(family, metric.removeprefix(family.prefix))
    return Series(gauge_name(metric), {})


def labels_of(series: Series) -> tuple[str, ...]:
    """The names of its labels, the run's first."""
    return ("run", *series.labels)


def help_of(metric: str) -> str:
    """What the series of a metric is, with its unit, in the characters that Ray's metrics take."""
    if metric in LIVE:
        found = LIVE[metric].help
    else:
        family = next((f for f in FAMILIES if metric.startswith(f.prefix) and metric not in ALONE), None)
        found = family.help if family else describe(metric)
    return found.axis.encode("ascii", "ignore").decode()


def gauge_name(metric: str) -> str:
    """A name Prometheus accepts: `reward/mean` becomes `rlhf_reward_mean`."""
    return "rlhf_" + re.sub(r"[^a-zA-Z0-9_]+", "_", metric)


def exported() -> dict[str, tuple[str, ...]]:
    """Every name that is known beforehand, as Prometheus sees it, with its labels but for the run's."""
    known = {gauge_name(name): live.labels for name, live in LIVE.items()}
    known |= {series_of(name).name: tuple(series_of(name).labels) for name in METRICS}
    known |= {family.name: family.labels for family in FAMILIES}
    known["rlhf_reward_component_std"] = ("component",)
    return {f"ray_{name}": labels for name, labels in known.items()}


def _member(family: Family, rest: str) -> Series:
    name = family.name
    if rest.endswith("/std"):
        name, rest = f"{name}_std", rest.removesuffix("/std")
    values = rest.split("/", len(family.labels) - 1)
    values += [""] * (len(family.labels) - len(values))
    return Series(name, dict(zip(family.labels, values, strict=True)))
