"""Experiment trackers beside metrics.jsonl: Weights & Biases and MLflow, each usable without a server.

Rows are delivered in a thread per tracker, so that a slow or missing server never delays the run. Packages are imported
in that thread. A row that is never delivered is still in metrics.jsonl.
"""

from __future__ import annotations

import logging as log
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from rlhf_ray.errors import ConfigError, first_line
from rlhf_ray.files.fsync import moved
from rlhf_ray.observability.run_directory import RunDirectory

MLFLOW_RUN = "mlflow_run.txt"
"""File in the run's directory with MLflow's id of the run, which a resumed run continues."""
WANDB_ANSWERS_S, WANDB_SENDS_S = 30.0, 20.0
"""Longest waits of W&B's client for its server to open a run (another ten seconds go to the login), and to take its
last numbers: within the deadlines of `Delivery`."""


class Wandb:
    """A Weights & Biases run. Without login or network it records offline (`wandb sync` sends it later)."""

    title, where = "W&B", "the W&B server"
    fix = "WANDB_MODE=offline records in the run's directory; logging.wandb_project leaves it out when empty"

    def __init__(self, run_dir: Path, project: str, resume_at: int | None = None) -> None:
        # A resumed run is a new W&B run in the group of the first: rewinding a run in place needs a server, which may
        # be unreachable.
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
        """Continue the MLflow run of a resumed run, or create one, with the configuration as parameters. Steps that are
        made again appear in MLflow twice, the later value last."""
        from mlflow import MlflowClient

        log.getLogger("urllib3.connectionpool").setLevel(log.ERROR)  # it logs each attempt to reach a server
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
        """The id of the experiment, which is created if it does not exist."""
        if known := self._client.get_experiment_by_name(self._experiment):
            return str(known.experiment_id)
        own = None if os.environ.get("MLFLOW_TRACKING_URI") else str(self._directory.path.resolve())
        return str(self._client.create_experiment(self._experiment, artifact_location=own))


def parameters(config: Path) -> list[tuple[str, str]]:
    """The resolved configuration as flat names and values, no longer than trackers accept; [] without the file."""
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


OPENING_S = 60.0
"""Longest wait for the tracker of a new run to open; W&B needs most of it before it falls back to offline mode."""
LATE_S = 60.0
"""Silence in one call after which a warning is logged."""
CLOSING_S = 30.0
"""Longest wait for queued rows at the end of a run: less than the notice of a spot machine."""
MOST_ROWS = 1000
"""Largest number of queued rows; some twenty megabytes."""


class Tracker(Protocol):
    """A service that keeps numbers of many runs. One thread calls it; each call may raise any error, or never
    return."""

    title: str
    """Name shown to the user."""
    where: str
    """Its server's address, or another description of its target."""
    fix: str
    """What to do when it cannot be opened."""

    def open(self) -> None:
        """Find or create its record of the run."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one step's finite numbers."""

    def close(self) -> None:
        """Deliver what it buffers itself, and mark the run as ended."""


class Delivery:
    """A sink that hands every row to a tracker's thread, and waits only in `close`, for a bounded time.

    The first problem is logged when it occurs, and at the end the number of rows that the tracker lacks.
    """

    def __init__(self, tracker: Tracker, must_open: bool) -> None:
        """
        Args:
            must_open: wait until the tracker is open, and fail if it cannot be opened; otherwise rows are queued until
                it is open.

        Raises:
            ConfigError: it must be open, and cannot be opened, or does not answer in time.
        """
        self._tracker = tracker
        self._rows: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        self._written = self._arrived = 0
        self._asked_at: float | None = None
        """Start of the call in progress; None between calls."""
        self._failure: Exception | None = None
        """Why it could not be opened."""
        self._open, self._given_up, self._warned = threading.Event(), False, False
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"{tracker.title} tracker")
        self._thread.start()
        if must_open:
            self._require_open()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Queue a row."""
        self._written += 1
        asked_at = self._asked_at
        if self._rows.qsize() >= MOST_ROWS:
            self._warn(f"does not keep up: {MOST_ROWS} rows wait for {self._tracker.where}, and no others will until "
                       "it takes some")
            return
        self._rows.put((step, dict(values)))
        if asked_at is not None and time.monotonic() - asked_at > LATE_S:
            self._warn(f"has not answered for {LATE_S:g} s ({self._tracker.where})")

    def close(self) -> None:
        """Let the tracker take the queued rows within its time."""
        self._rows.put(None)
        late, self._given_up = not _in_time(self._ended, CLOSING_S), True
        missing = self._written - self._arrived
        why = f": {self._tracker.where} did not take them within {CLOSING_S:g} s" if late else ""
        if missing:
            self._say(f"{self._tracker.title} lacks {missing} of {self._written} rows{why}. metrics.jsonl has them")
        elif late:
            self._say(f"{self._tracker.title} has all rows, but its connection was not closed within {CLOSING_S:g} s "
                      f"({self._tracker.where})")

    def _ended(self, within_s: float) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _require_open(self) -> None:
        if not _in_time(self._open.wait, OPENING_S):
            self._given_up = True
            raise ConfigError(f"{self._tracker.title} cannot be opened: {self._tracker.where} has not answered within "
                              f"{OPENING_S:g} s; {self._tracker.fix}")
        if self._failure is not None:
            raise ConfigError(f"{self._tracker.title} cannot be opened at {self._tracker.where}: "
                              f"{first_line(self._failure)}; {self._tracker.fix}") from self._failure

    def _work(self) -> None:
        self._failure = self._ask(self._tracker.open)
        self._open.set()
        if self._failure is not None:
            self._warn(f"gets no numbers: it cannot be opened at {self._tracker.where}: {first_line(self._failure)}")
            return
        while not self._given_up and (row := self._rows.get()) is not None:
            if (error := self._ask(self._tracker.write, *row)) is None:
                self._arrived += 1
            else:
                self._warn(f"did not take the numbers of step {row[0]}: {first_line(error)}")
        if not self._given_up and (error := self._ask(self._tracker.close)) is not None:
            self._warn(f"could not be closed: {first_line(error)}")

    def _ask(self, call: Callable[..., None], *arguments: Any) -> Exception | None:
        """Make one call; returns what it raised."""
        self._asked_at = time.monotonic()
        try:
            call(*arguments)
        except Exception as error:  # the tracker's library may raise anything
            return error
        finally:
            self._asked_at = None
        return None

    def _warn(self, trouble: str) -> None:
        """Log the first problem only; nothing once the tracker was given up."""
        if not self._warned and not self._given_up:
            self._warned = True
            self._say(f"{self._tracker.title} {trouble}. The run continues; its numbers are in metrics.jsonl")

    def _say(self, text: str) -> None:
        log.getLogger(__name__).warning("%s", text)


def _in_time(over: Callable[[float], bool], limit_s: float) -> bool:
    """Wait for something, piece by piece: a wait with a deadline is no standstill of the file thread that it runs
    in."""
    end = time.monotonic() + limit_s
    while (left_s := end - time.monotonic()) > 0:
        if over(min(left_s, 1.0)):
            return True
        moved()
    return over(0.0)
