"""Gauges on Ray's Prometheus endpoint, `ray_rlhf_reward_mean{run="..."}`, while this process is joined to Ray."""

from __future__ import annotations

import logging as log
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rlhf_ray.errors import first_line
from rlhf_ray.observability.series import Series, gauge_name, help_of, labels_of, series_of

REPEAT_S = 5.0
"""Ray forgets a gauge that was not set again before its second report, 20 s after the last."""


class LiveValue(NamedTuple):
    """The present value of one of the live metrics."""

    metric: str
    """One of `series.LIVE`."""
    value: float
    labels: dict[str, str]


class Gauges:
    """The gauges of one run, made when they are first set."""

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
        """Set the metrics of a row."""
        self._row = {**self._row, **values}
        self.repeat_row()

    def repeat_row(self) -> None:
        """Set all metrics of rows again, as they were."""
        if joined():
            for metric, value in self._row.items():
                self._set(series_of(metric), help_of(metric), value)

    def close(self) -> None:
        """Forget the gauges; the endpoint forgets them some time after the process has ended."""
        self._gauges.clear()

    def _set(self, series: Series, help_text: str, value: float) -> None:
        if series.name not in self._gauges:
            from ray.util.metrics import Gauge

            self._gauges[series.name] = Gauge(series.name, description=help_text, tag_keys=labels_of(series))
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
            except Exception as error:  # the endpoint lacks these numbers; metrics.jsonl has them
                if failed != (failed := first_line(error)):
                    log.getLogger(__name__).warning("gauges of the run cannot be repeated: %s", failed)


def joined() -> bool:
    """Whether this process is joined to Ray. One that never was need not load it to find that out."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())
