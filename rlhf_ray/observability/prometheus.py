"""Metrics on Ray's Prometheus endpoint, such as `ray_rlhf_reward_mean{run="..."}`: their names, labels and help texts,
and the gauges that are set while this process is connected to Ray.

Metrics of a row have roles and components in their names (`share/generator/busy`), which queries need as labels. Live
metrics, which change between rows too, are listed here with their labels.
"""

from __future__ import annotations

import logging as log
import re
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rlhf_ray.errors import first_line
from rlhf_ray.observability.metric_catalogue import NONE_IF_ABSENT, Metric, describe


class Series(NamedTuple):
    """One time series, or all series of a name when the labels are empty."""

    name: str
    """As Ray exports it, without the leading `ray_`."""
    labels: dict[str, str]


class Family(NamedTuple):
    """Metrics of a row that share one name in Prometheus and differ in labels."""

    prefix: str
    labels: tuple[str, ...]
    help: Metric
    called: str = ""
    """The name in Prometheus, when the prefix is another metric's name."""

    @property
    def name(self) -> str:
        """The name in Prometheus."""
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
    Family("eval/pass@", ("k", "component"), Metric("Held-out prompts solved by one of k samples",
                                                    "share of prompts")),
)
ALONE = ("time/step",)
"""Metrics that have a family's prefix and do not belong to it."""


class Live(NamedTuple):
    """A metric that is written every few seconds, independent of steps."""

    labels: tuple[str, ...]
    help: Metric


LIVE: dict[str, Live] = {
    "live/step": Live((), Metric("Updates made so far", "steps")),
    "live/steps": Live((), Metric("Updates that the run will make", "steps")),
    "live/samples": Live((), Metric("Samples trained on so far", "samples")),
    "live/step_age": Live((), Metric("Time since the last update ended, or the run began", "seconds")),
    "live/workers": Live(("role", "pool", "state"), Metric("Workers that are busy, idle, down, or not replaced",
                                                                "workers")),
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


def help_of(metric: str) -> str:
    """The help text of a metric with its unit, in the characters that Ray's metrics accept."""
    if metric in LIVE:
        found = LIVE[metric].help
    else:
        family = next((f for f in FAMILIES if metric.startswith(f.prefix) and metric not in ALONE), None)
        found = family.help if family else describe(metric)
    return found.axis.encode("ascii", "ignore").decode()


def gauge_name(metric: str) -> str:
    """A name that Prometheus accepts: `reward/mean` becomes `rlhf_reward_mean`."""
    return "rlhf_" + re.sub(r"[^a-zA-Z0-9_]+", "_", metric)


def _member(family: Family, rest: str) -> Series:
    name = family.name
    if rest.endswith("/std"):
        name, rest = f"{name}_std", rest.removesuffix("/std")
    values = rest.split("/", len(family.labels) - 1)
    values += [""] * (len(family.labels) - len(values))
    return Series(name, dict(zip(family.labels, values, strict=True)))


REPEAT_S = 5.0
"""Ray forgets a gauge that is not set again before its second report, 20 s after the last."""


class LiveValue(NamedTuple):
    """The present value of one of the live metrics."""

    metric: str
    """One of `LIVE`."""
    value: float
    labels: dict[str, str]


class Gauges:
    """The gauges of one run, created when they are first set."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._gauges: dict[str, Any] = {}
        self._row: dict[str, float] = {}
        """The last value of each metric of rows."""

    def set_live(self, values: Iterable[LiveValue]) -> None:
        """Set live metrics."""
        if joined():
            for metric, value, labels in values:
                self._set(Series(gauge_name(metric), labels), help_of(metric), value)

    def set_row(self, values: Mapping[str, float]) -> None:
        """Set the metrics of a row. Where a step's row lacks what rows have only if it is not 0, it is 0; other metrics
        keep their last values."""
        absent = {name: 0.0 for name in self._row if name.startswith(NONE_IF_ABSENT)} if "time/step" in values else {}
        self._row = {**self._row, **absent, **values}
        self.repeat_row()

    def repeat_row(self) -> None:
        """Set all metrics of rows again with their last values."""
        if joined():
            for metric, value in self._row.items():
                self._set(series_of(metric), help_of(metric), value)

    def close(self) -> None:
        """Forget the gauges; the endpoint forgets them some time after the process has ended."""
        self._gauges.clear()

    def _set(self, series: Series, help_text: str, value: float) -> None:
        if series.name not in self._gauges:
            from ray.util.metrics import Gauge

            self._gauges[series.name] = Gauge(series.name, description=help_text, tag_keys=("run", *series.labels))
        self._gauges[series.name].set(value, tags={"run": self._run, **series.labels})


class RaySink:
    """Each row's numbers as gauges, repeated until the next row; see `sinks.Sink`."""

    def __init__(self, run: str) -> None:
        self._gauges, self._over = Gauges(run), threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="gauges", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._gauges.set_row({**values, "step": float(step)})

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._gauges.close()

    def _repeat(self) -> None:
        failed = ""
        while not self._over.wait(REPEAT_S):
            try:
                self._gauges.repeat_row()
            except Exception as error:  # the endpoint lacks these numbers, but metrics.jsonl has them
                if failed != (failed := first_line(error)):
                    log.getLogger(__name__).warning("gauges of the run cannot be repeated: %s", failed)


def joined() -> bool:
    """Whether this process is connected to Ray, without importing Ray to find out."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())
