"""Experiment trackers beside metrics.jsonl: W&B, Trackio, MLflow and the others that accelerate has classes for.

Each gets the resolved configuration, the metrics (`HEADLINES` under short names) and, where it has tables, samples.
`delivery` calls it in a thread, in which its package is imported.
"""

from __future__ import annotations

import logging as log
import math
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rlhf_ray.config.training_loop import LoggingConfig, TrackerName
from rlhf_ray.observability.metric_catalogue import HEADLINES
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.observability.sample_files import read_samples

TITLES: dict[TrackerName, str] = {
    "aim": "Aim", "clearml": "ClearML", "comet_ml": "Comet", "dvclive": "DVCLive", "mlflow": "MLflow",
    "swanlab": "SwanLab", "trackio": "Trackio", "wandb": "W&B",
}
"""What the services are called."""
WANDB_ANSWERS_S = 30.0
"""Longest wait of W&B's client for its server to open a run. Another ten seconds go to the login; both are within
`delivery.OPENING_S`."""
WANDB_SENDS_S = 20.0
"""Longest wait of W&B's client for its server to take the last numbers, within `delivery.CLOSING_S`."""
WITH_TABLES = ("trackio", "wandb")
"""Services that get samples."""
TABLE_ROWS = 12
"""Largest number of samples in a table."""
TABLE_TEXT = 2000
"""Largest number of characters in one of their texts."""
TABLE_EVERY_S = 30.0
"""Shortest time between two tables: services keep each in a file of its own, and small runs make several steps a
second."""
COLUMNS = {"prompt": "prompt", "response": "response", "score": "reward", "kl": "kl", "gold": "gold"}
"""Columns of a table, by the column of the files in samples/."""
_USER_INFO = re.compile(r"(?<=://)[^\s?'\"]+@")
_QUERY = re.compile(r"(://[^\s?]*\?)[^\s'\"]+")
_SECRET = re.compile(r"(token|(^|[_-])auth|password|passwd|secrets?|credentials?|api[_-]?keys?|authorization|headers|"
                     r"variables)$", re.IGNORECASE)
"""Names of values that are not logged, nor what is within them. Not `tokens`, which are numbers or how they count."""


class ServiceTracker:
    """A tracker of accelerate's as a `delivery.Tracker`. A resumed run continues its record in W&B, Trackio and MLflow,
    and by the documentation of SwanLab, Comet and DVCLive in these; in the others it begins another one.

    Steps that a resumed run makes again are logged again. W&B drops rows of steps before its newest, so there the step
    is a metric, against which the others are plotted.
    """

    def __init__(self, name: TrackerName, run: RunDirectory, logging: LoggingConfig, resumed: bool) -> None:
        self.title = TITLES[name]
        self.where = f"{self.title}'s server"
        self.fix = f"leave {name} out of logging.trackers"
        if name == "wandb":
            self.fix = f"set WANDB_MODE=offline, which records in the run's directory, or {self.fix}"
        if name == "mlflow":
            self.where = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.path.resolve() / 'mlflow.db'}"
            self.fix = f"correct MLFLOW_TRACKING_URI, or {self.fix}"
        self._name = name
        self._run = run
        self._logging = logging
        self._mark = run.path / f"{name}_run.txt"
        """File with the service's id of the run, which a resumed run continues."""
        self._known = self._mark.read_text().strip() if resumed and self._mark.is_file() else None
        self._table_at = -math.inf
        self._tracker: Any = None

    def open(self) -> None:
        """Continue the service's record of the run, or create one. Without login or network W&B records offline."""
        run_id = self._known or uuid.uuid4().hex
        try:
            self._start(run_id)
        except Exception as error:
            if self._name != "wandb":
                raise
            import wandb

            log.getLogger(__name__).warning("W&B records offline, in %s/wandb: %s", self._run.path, error)
            wandb.teardown()  # its process still tries to open the run, whose id is in use until it ends
            self._start(run_id, mode="offline")
        if self._name == "wandb":
            self._tracker.tracker.define_metric("*", step_metric="step")
        elif self._name == "mlflow":
            run_id = self._tracker.tracker.info.run_id
        if not (self._name == "mlflow" and self._known) and self._name != "trackio":  # MLflow's parameters are final
            self._tracker.store_init_configuration(self._parameters())
        self._mark.write_text(run_id)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log a step's numbers, and its samples if they were saved and no other table was logged just now."""
        row: dict[str, Any] = {HEADLINES.get(name, name): value for name, value in values.items()}
        if "samples/bytes" in values and self._name in WITH_TABLES:
            row |= self._samples(step)
        if self._name == "wandb":
            self._tracker.log({**row, "step": step})
        elif self._name == "mlflow":
            self._tracker.log({mlflow_name(name): value for name, value in row.items()}, step=step)
        else:
            self._tracker.log(row, step=step)

    def close(self) -> None:
        """Let the service take what it buffers, and end its record."""
        self._tracker.finish()

    def _start(self, run_id: str, **more: Any) -> None:
        from rlhf_ray.internals.accelerate import new_tracker

        project = self._logging.project
        if self._name == "aim":  # accelerate takes its first argument for the name of the run
            self._tracker = new_tracker("aim", self._title_of_run(), str(self._run.path), experiment=project)
        else:
            self._tracker = new_tracker(self._name, project, **self._arguments(run_id), **more)
        self._tracker.start()

    def _arguments(self, run_id: str) -> dict[str, Any]:
        """What the service's own function takes besides the project."""
        name = self._title_of_run()
        tags = self._logging.tags
        path = self._run.path.resolve()
        if self._name == "wandb":
            import wandb

            settings = wandb.Settings(init_timeout=WANDB_ANSWERS_S, finish_timeout=WANDB_SENDS_S)
            return {"name": name, "tags": tags, "id": run_id, "resume": "allow", "dir": str(path), "settings": settings}
        if self._name == "trackio":
            # Trackio continues runs by their names alone, and has no tags. The configuration goes in here, because
            # accelerate's method for it adds a key of its own. In a notebook `embed` opens the page in a cell.
            config = {**self._parameters(), **({"tags": ", ".join(tags)} if tags else {})}
            return {"name": f"{name}-{run_id[:6]}", "resume": "allow", "config": config, "embed": False}
        if self._name == "mlflow":
            use_mlflow_at(self.where)
            own = self.where.startswith("sqlite:") and not os.environ.get("MLFLOW_TRACKING_URI")
            return {"run_name": name, "run_id": self._known, "tags": {mlflow_name(tag): "true" for tag in tags},
                    "logging_dir": str(path) if own else None}
        if self._name == "swanlab":
            return {"name": name, "tags": tags, "id": run_id, "resume": "allow", "log_dir": str(path / "swanlog")}
        if self._name == "clearml":
            return {"task_name": name, "tags": tags, "reuse_last_task_id": False}
        if self._name == "dvclive":
            return {"dir": str(path / "dvclive"), "resume": self._known is not None, "save_dvc_exp": False}
        return {"experiment_key": run_id}  # Comet

    def _title_of_run(self) -> str:
        return self._logging.run_name or self._run.path.resolve().name

    def _parameters(self) -> dict[str, Any]:
        found = dict(parameters(self._run.config))
        return {mlflow_name(name): value for name, value in found.items()} if self._name == "mlflow" else found

    def _samples(self, step: int) -> dict[str, Any]:
        """The table of a step's samples, of as many prompts as possible; {} if it has none, or if the last table was
        just now."""
        now = time.monotonic()
        if now - self._table_at < TABLE_EVERY_S:
            return {}
        saved = read_samples(self._run.samples, step, ("sample", *COLUMNS))
        chosen = sorted(saved, key=lambda row: row["sample"])[:TABLE_ROWS]
        if not chosen:
            return {}
        self._table_at = now
        if self._name == "wandb":
            from wandb import Table
        else:
            from trackio import Table
        present = [name for name in COLUMNS if any(row.get(name) is not None for row in chosen)]
        rows = [[step, *(_shortened(row[name]) for name in present)] for row in chosen]
        return {"samples": Table(columns=["step", *(COLUMNS[name] for name in present)], data=rows)}


def _shortened(value: Any) -> Any:
    """A text of at most `TABLE_TEXT` characters; other values as they are."""
    return value[:TABLE_TEXT - 1] + "…" if isinstance(value, str) and len(value) > TABLE_TEXT else value


def use_mlflow_at(address: str) -> None:
    """Let MLflow log to an address. Its own function also sets MLFLOW_TRACKING_URI, which would be taken for the
    user's by the next run of this process."""
    import mlflow

    log.getLogger("urllib3.connectionpool").setLevel(log.ERROR)  # it logs each attempt to reach a server
    users = os.environ.get("MLFLOW_TRACKING_URI")
    mlflow.set_tracking_uri(address)
    if users is None:
        os.environ.pop("MLFLOW_TRACKING_URI", None)


def parameters(config: Path) -> Iterator[tuple[str, Any]]:
    """The resolved configuration as flat names and values, for a service that others may read; none without the file.

    Left out: empty values, commands and their variables, what is called a token or the like, of any type. The user
    name, password and query of an address are replaced. Texts are cut to the 500 characters that every version of
    MLflow takes.
    """
    def walk(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
        for key, inner in value.items():
            name = f"{prefix}.{key}" if prefix else str(key)
            is_command = key in ("run", "command") and isinstance(inner, list)
            if inner is None or is_command or _SECRET.search(str(key)):
                continue
            if isinstance(inner, Mapping):
                yield from walk(name, inner)
            elif isinstance(inner, list) and any(isinstance(item, Mapping) for item in inner):
                yield from walk(name, dict(enumerate(inner)))
            elif isinstance(inner, (bool, int, float)):
                yield name, inner
            else:
                yield name, _QUERY.sub(r"\1***", _USER_INFO.sub("***@", str(inner)))[:500]

    return walk("", yaml.safe_load(config.read_text()) if config.is_file() else {})


def mlflow_name(metric: str) -> str:
    """A name MLflow accepts: letters, digits, `_-. :/` alone; `eval/pass@4` becomes `eval/pass_4`."""
    return "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in metric)
