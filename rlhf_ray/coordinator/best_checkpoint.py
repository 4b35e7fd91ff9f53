"""The best step of a run by a held-out metric: its checkpoint is kept, and its model exported to best/."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.config.training_loop import CheckpointConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.observability.run_directory import RunDirectory


@dataclass
class BestSoFar:
    """The best value of a metric and its step. None: not evaluated yet. Step 0 is the model before training."""

    step: int | None = None
    value: float | None = None
    metric: str | None = None
    """The metric's name: values of different metrics are not compared."""
    mode: str | None = None
    """"max" or "min": nor are the best in both directions."""

    def improved_by(self, value: float, mode: str) -> bool:
        """Whether `value` is better ("max" or "min"). An equal value or NaN is not."""
        if self.value is None:
            return value == value
        return value > self.value if mode == "max" else value < self.value

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers for the checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.step, self.value, self.metric, self.mode = (state[name] for name in ("step", "value", "metric", "mode"))

    def follow(self, metric: str | None, mode: str | None) -> None:
        """Reset if the metric or its direction has changed."""
        if (metric, mode) != (self.metric, self.mode):
            self.step, self.value, self.metric, self.mode = None, None, metric, mode


class BestKeeper:
    """Follows the metric that `checkpoint.best_metric` names through the evaluations of a run.

    An evaluation that is better than all before makes its step the best: the caller saves a checkpoint, which is never
    pruned while it is the best, and `keep` exports the model and writes the step to best.json. The model before
    training is the baseline; it has neither checkpoint nor export.
    """

    def __init__(self, config: CheckpointConfig, directory: RunDirectory, store: CheckpointStore, best: BestSoFar,
                 export: Callable[[Path], Awaitable[Any]]) -> None:
        """
        Args:
            best: the part of the run's state that this keeper writes.
            export: writes the present model to a directory, replacing what is there when it is whole.
        """
        self._config, self._directory, self._store, self._best = config, directory, store, best
        self._export = export

    def consider(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Compare an evaluation; True if it makes `step` the best. The caller then saves a checkpoint and calls `keep`.

        Raises:
            ConfigError: the evaluation has no such metric; names those it has.
        """
        name, mode = self._config.best_metric, self._config.best_mode
        if name is None or mode is None:
            return False
        if name not in metrics:
            measured = ", ".join(sorted(metrics)) or "none: there are no held-out rows"
            raise ConfigError(f"checkpoint.best_metric={name!r} is not a metric of this run ({measured}); name one "
                              "of these, or none")
        self._best.follow(name, mode)
        if not self._best.improved_by(metrics[name], mode):
            return False
        previous = self._best.step
        self._best.step, self._best.value = step, metrics[name]
        self._store.protect({s for s in (previous, step) if s})  # the previous one stays until this one is on disk
        return step > 0

    async def keep(self) -> None:
        """Export the model of the best step, which is the present one and has a checkpoint, and write best.json."""
        await self._export(self._directory.best.absolute())
        await self._directory.files.records.run(self._directory.write_json, "best.json", self._mark())
        self._store.protect({self._best.step} if self._best.step else set())

    async def resume(self, step: int) -> str | None:
        """After a restore of the checkpoint of `step`: protect the best checkpoint, and finish a `keep` that was
        interrupted. Returns a warning, or None."""
        self._best.follow(self._config.best_metric, self._config.best_mode)
        best = self._best.step
        self._store.protect({best} if best else set())
        marked = await self._directory.files.records.run(self._directory.best_step)
        if not best or marked == best:
            return None
        if best == step:
            await self.keep()
            return None
        return (f"the checkpoint of step {step} records step {best} as the best, but best/ contains "
                f"{'no model' if marked is None else f'the model of step {marked}'}; the next better evaluation "
                "replaces it")

    def summary(self) -> dict[str, Any]:
        """Its entries in summary.json; empty without a metric or an evaluation."""
        if self._best.metric is None or self._best.step is None:
            return {}
        return {"best_step": self._best.step, "best_metric": self._best.metric, "best_value": self._best.value}

    def _mark(self) -> dict[str, Any]:
        return {"step": self._best.step, "metric": self._best.metric, "mode": self._config.best_mode,
                "value": self._best.value, "checkpoint": f"checkpoints/step_{self._best.step}", "model": "best"}
