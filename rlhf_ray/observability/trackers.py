"""Experiment trackers beside metrics.jsonl: Weights & Biases and MLflow, each by configuration, each able to do without
a server. Their packages are imported when a tracker is opened, never before."""

from __future__ import annotations

import logging as log
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rlhf_ray.errors import ConfigError
from rlhf_ray.observability.run_directory import RunDirectory

MLFLOW_RUN = "mlflow_run.txt"
"""In the run's directory: MLflow's id of the run, which a resumed run goes on with."""


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


class MlflowSink:
    """An MLflow run. Without MLFLOW_TRACKING_URI it is kept in a database file of the run's directory
    (`mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db` shows it). A tracking server that is out of reach costs
    numbers in MLflow and not the run: they are in metrics.jsonl.

    Raises:
        ConfigError: the package is not installed, or the tracking server refuses the experiment of a new run.
    """

    def __init__(self, run: RunDirectory, experiment: str, resume_at: int | None = None) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.exceptions import MlflowException
        except ImportError as error:
            raise ConfigError(
                f"logging.mlflow_experiment={experiment!r} needs the mlflow package: "
                "pip install 'rlhf-ray[mlflow]', or leave logging.mlflow_experiment empty"
            ) from error
        self._failure: type[Exception] = MlflowException
        self._run: str | None = None
        where = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.path.resolve() / 'mlflow.db'}"
        try:
            self._client: Any = MlflowClient(tracking_uri=where)
            self._run = self._opened(run, experiment, resume_at)
        except MlflowException as error:
            if resume_at is not None and (run.path / MLFLOW_RUN).is_file():  # as when it is lost later in the run
                log.getLogger(__name__).warning("MLflow gets no numbers: %s cannot be opened: %s", where, error)
                return
            raise ConfigError(f"logging.mlflow_experiment={experiment!r} cannot be opened at {where}: {error}; correct "
                              "MLFLOW_TRACKING_URI, or leave logging.mlflow_experiment empty") from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._run is None:
            return
        from mlflow.entities import Metric

        now = _milliseconds()
        metrics = [Metric(mlflow_name(name), value, now, step) for name, value in values.items()]
        try:
            self._client.log_batch(self._run, metrics=metrics, synchronous=True)
        except self._failure as error:
            log.getLogger(__name__).warning("MLflow did not take the numbers of step %d: %s", step, error)

    def close(self) -> None:
        if self._run is None:
            return
        try:
            self._client.set_terminated(self._run)
        except self._failure as error:
            log.getLogger(__name__).warning("MLflow was not told that the run is over: %s", error)

    def _opened(self, run: RunDirectory, experiment: str, resume_at: int | None) -> str:
        """The id of the run that a resumed run goes on with, or of a new one with the configuration as parameters.
        Steps that are made again stand in MLflow twice, the later value last."""
        mark = run.path / MLFLOW_RUN
        if resume_at is not None and mark.is_file():
            found = str(self._client.get_run(mark.read_text().strip()).info.run_id)
            self._client.update_run(found, status="RUNNING")
            return found
        known = self._client.get_experiment_by_name(experiment)
        own = None if os.environ.get("MLFLOW_TRACKING_URI") else str(run.path.resolve())
        place = known.experiment_id if known else self._client.create_experiment(experiment, artifact_location=own)
        made = str(self._client.create_run(place, run_name=run.path.name).info.run_id)
        for name, value in parameters(run.config):
            self._client.log_param(made, name, value)
        mark.write_text(made)
        return made


def parameters(config: Path) -> list[tuple[str, str]]:
    """The resolved configuration as flat names and values, none longer than trackers take; [] without the file."""
    flat: list[tuple[str, str]] = []

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        elif value is not None:
            flat.append((mlflow_name(prefix), str(value)[:500]))

    walk("", yaml.safe_load(config.read_text()) if config.is_file() else {})
    return flat


def mlflow_name(metric: str) -> str:
    """A name MLflow accepts: letters, digits, `_-. :/` alone; `eval/pass@4` becomes `eval/pass_4`."""
    return "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in metric)


def _milliseconds() -> int:
    import time

    return int(time.time() * 1000)
