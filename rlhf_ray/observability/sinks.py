"""Where a step's numbers are shown besides metrics.jsonl: TensorBoard, trackers, Ray's Prometheus endpoint.

Each package is imported when its sink is opened. Values given to a sink are finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from rlhf_ray.config.training_loop import LoggingConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.observability.delivery import Delivery
from rlhf_ray.observability.prometheus import RaySink
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.observability.trackers import ServiceTracker


class Sink(Protocol):
    """Takes one step's numbers."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Show finite `values` by metric name."""

    def close(self) -> None:
        """Deliver what is still buffered."""


def require_trackers(logging: LoggingConfig) -> None:
    """Refuse a tracker whose package is missing, before anything starts.

    Raises:
        ConfigError: naming the field and the package.
    """
    for name in logging.trackers:
        if find_spec(name) is None:
            raise ConfigError(f"logging.trackers={logging.trackers!r} needs the {name} package: pip install {name}, or "
                              f"leave {name} out")

def open_sinks(run: RunDirectory, logging: LoggingConfig, resume_at: int | None) -> list[Sink]:
    """The configured sinks. A resumed run does not wait for its trackers.

    Raises:
        ConfigError: a tracker's package is missing, or a new run's tracker cannot be opened.
    """
    require_trackers(logging)
    new = resume_at is None
    trackers = [ServiceTracker(name, run, logging, resumed=not new) for name in logging.trackers]
    sinks: list[Sink] = [Delivery(tracker, must_open=new) for tracker in trackers]
    if logging.tensorboard:
        sinks.append(TensorBoardSink(run.tensorboard, resume_at))
    if logging.ray_metrics:
        sinks.append(RaySink(run.path.name))
    return sinks


class TensorBoardSink:
    """Scalars in event files, one file a process; on resume, steps that will be made again are purged."""

    def __init__(self, directory: Path, resume_at: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resume_at is None else resume_at + 1
        self._writer: Any = SummaryWriter(str(directory), purge_step=purge)  # type: ignore[no-untyped-call]

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
