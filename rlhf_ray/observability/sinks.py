"""Where a step's numbers go beside metrics.jsonl: TensorBoard, Weights & Biases, Ray's Prometheus endpoint.

Each package is imported when its sink is opened, never before. Values given to a sink are finite.
"""

from __future__ import annotations

import logging as log
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rlhf_ray.config.loop import LoggingConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.observability.catalogue import describe
from rlhf_ray.observability.run_directory import RunDirectory


class Sink(Protocol):
    """Takes one step's numbers."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Show finite `values` by metric name."""

    def close(self) -> None:
        """Deliver what is still held back."""


def open_sinks(run: RunDirectory, logging: LoggingConfig, resume_at: int | None) -> list[Sink]:
    """The sinks that the configuration asks for.

    Raises:
        ConfigError: logging.wandb_project is set and the package is missing.
    """
    sinks: list[Sink] = []
    if logging.wandb_project:
        sinks.append(WandbSink(run.path, logging.wandb_project, resume_at))
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


class WandbSink:
    """A Weights & Biases run. Without login or network it records offline (`wandb sync` sends it later).

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(self, run_dir: Path, project: str, resume_at: int | None = None) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"logging.wandb_project={project!r} needs the wandb package: "
                "pip install 'rlhf-ray[wandb]', or leave logging.wandb_project empty"
            ) from error
        arguments: dict[str, Any] = {"project": project, "name": run_dir.name, "dir": str(run_dir)}
        if resume_at is not None:
            # A new W&B run in the group of the first: rewinding one in place needs a server that may be out of reach.
            arguments["notes"] = f"resumed at step {resume_at}"
        arguments["group"] = run_dir.name
        try:
            self._run: Any = wandb.init(**arguments)
        except wandb.errors.Error as error:
            log.getLogger(__name__).warning("W&B records offline, in %s/wandb: %s", run_dir, error)
            self._run = wandb.init(mode="offline", **arguments)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class RaySink:
    """Gauges on Ray's Prometheus endpoint (`ray_rlhf_reward_mean{run="..."}`), while this process is joined to Ray."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._gauges: dict[str, Any] = {}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        # Looked up and not imported: a process that never joined Ray need not load it to find that out.
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return
        for name, value in {**values, "step": float(step)}.items():
            self._gauge(name).set(value, tags={"run": self._run})

    def close(self) -> None:
        self._gauges.clear()

    def _gauge(self, name: str) -> Any:
        if name not in self._gauges:
            from ray.util.metrics import Gauge

            help_text = describe(name).axis.encode("ascii", "ignore").decode()  # Ray's metrics take nothing else
            self._gauges[name] = Gauge(gauge_name(name), description=help_text, tag_keys=("run",))
        return self._gauges[name]


def gauge_name(metric: str) -> str:
    """A name Prometheus accepts: `reward/mean` becomes `rlhf_reward_mean`."""
    return "rlhf_" + re.sub(r"[^a-zA-Z0-9_]+", "_", metric)
