"""Experiment trackers beside metrics.jsonl: Weights & Biases and MLflow, each by configuration, each able to do without
a server. `delivery.py` calls them in a thread, and their packages are imported there."""

from __future__ import annotations

import logging as log
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rlhf_ray.observability.run_directory import RunDirectory

MLFLOW_RUN = "mlflow_run.txt"
"""In the run's directory: MLflow's id of the run, which a resumed run goes on with."""
WANDB_ANSWERS_S, WANDB_SENDS_S = 30.0, 20.0
"""How long W&B's client waits for its server to open a run (another ten seconds go to the login), and to take its last
numbers: within the deadlines of `delivery.py`."""


class Wandb:
    """A Weights & Biases run. Without login or network it records offline (`wandb sync` sends it later)."""

    title, where = "W&B", "the W&B server"
    fix = "WANDB_MODE=offline records in the run's directory; logging.wandb_project leaves it out when empty"

    def __init__(self, run_dir: Path, project: str, resume_at: int | None = None) -> None:
        # A resumed run is a new W&B run in the group of the first: rewinding one in place needs a server that may be
        # out of reach.
        self._arguments: dict[str, Any] = {"project": project, "name": run_dir.name, "group": run_dir.name,
                                           "dir": str(run_dir)}
        if resume_at is not None:
            self._arguments["notes"] = f"resumed at step {resume_at}"

    def open(self) -> None:
        import wandb

        settings = wandb.Settings(init_timeout=WANDB_ANSWERS_S, finish_timeout=WANDB_SENDS_S)
        try:
            self._run: Any = wandb.init(settings=settings, **self._arguments)
        except wandb.errors.Error as error:
            log.getLogger(__name__).warning("W&B records offline, in %s/wandb: %s", self._arguments["dir"], error)
            self._run = wandb.init(mode="offline", **self._arguments)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """An MLflow run. Without MLFLOW_TRACKING_URI it is kept in a database file of the run's directory
    (`mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db` shows it)."""

    def __init__(self, run: RunDirectory, experiment: str, resume_at: int | None = None) -> None:
        self.title = "MLflow"
        self.where = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.path.resolve() / 'mlflow.db'}"
        self.fix = f"correct MLFLOW_TRACKING_URI, or leave logging.mlflow_experiment={experiment!r} empty"
        self._directory, self._experiment, self._resumed = run, experiment, resume_at is not None
        self._run = ""

    def open(self) -> None:
        """Go on in the MLflow run of a resumed run, or make one, with the configuration as parameters. Steps that are
        made again stand in MLflow twice, the later value last."""
        from mlflow import MlflowClient

        log.getLogger("urllib3.connectionpool").setLevel(log.ERROR)  # each of its many tries, to no server
        self._client: Any = MlflowClient(tracking_uri=self.where)
        mark = self._directory.path / MLFLOW_RUN
        if self._resumed and mark.is_file():
            self._run = str(self._client.get_run(mark.read_text().strip()).info.run_id)
            self._client.update_run(self._run, status="RUNNING")
            return
        self._run = str(self._client.create_run(self._place(), run_name=self._directory.path.name).info.run_id)
        for name, value in parameters(self._directory.config):
            self._client.log_param(self._run, name, value)
        mark.write_text(self._run)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(mlflow_name(name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics, synchronous=True)

    def close(self) -> None:
        self._client.set_terminated(self._run)

    def _place(self) -> str:
        """The id of the experiment, which is made where there is none."""
        if known := self._client.get_experiment_by_name(self._experiment):
            return str(known.experiment_id)
        own = None if os.environ.get("MLFLOW_TRACKING_URI") else str(self._directory.path.resolve())
        return str(self._client.create_experiment(self._experiment, artifact_location=own))


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
