"""Which step is the best, what is kept of it, and that an interruption at any point is set right."""

import asyncio
import json

import pytest

from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.config.training_loop import CheckpointConfig
from rlhf_ray.coordinator.best_checkpoint import BestKeeper, BestSoFar
from rlhf_ray.errors import ConfigError
from rlhf_ray.observability.run_directory import RunDirectory
from tests.checkpoints import new_checkpoint

NAN = float("nan")


class Run:
    """A run of steps with a held-out number each, saved every step with `keep: 1`; the model is the step's number."""

    def __init__(self, path, state=None, metric="reward", **settings):
        self.directory = RunDirectory.create(path, resume=True)
        self.store = CheckpointStore(self.directory.checkpoints, keep=1)
        self.best, self.step = BestSoFar(), 0
        if state:
            self.best.load_state_dict(json.loads(json.dumps(state)))
        self.keeper = BestKeeper(CheckpointConfig(best_metric=metric, **settings), self.directory, self.store,
                                 self.best, self._export)

    async def _export(self, place):
        place.mkdir(exist_ok=True)
        (place / "model").write_text(str(self.step))

    def save(self):
        with new_checkpoint(self.store, self.step) as place:
            (place / "state").write_text("x")

    def evaluate(self, step, keep=True, **metrics):
        self.step = step
        improved = self.keeper.consider(step, metrics)
        if step:
            self.save()
        if improved and keep:
            asyncio.run(self.keeper.keep())
        return improved

    def resume(self, step):
        self.step = step
        return asyncio.run(self.keeper.resume(step))

    def checkpoints(self):
        return {p.name for p in self.directory.checkpoints.iterdir()}

    def found(self):
        """(step in best.json, step of the model in best/)."""
        mark = json.loads(self.directory.best_mark.read_text())
        return mark["step"], int((self.directory.best / "model").read_text())


def test_each_improvement_takes_the_place_of_the_last_and_is_not_pruned(tmp_path):
    run = Run(tmp_path)
    assert [run.evaluate(step, reward=r) for step, r in enumerate([0.0, 1.0, 0.5, 2.0, 2.0, 1.0])] == [
        False, True, False, True, False, False]
    assert run.checkpoints() == {"step_3", "step_5"}
    assert run.found() == (3, 3)
    assert json.loads(run.directory.best_mark.read_text()) == {
        "step": 3, "metric": "reward", "mode": "max", "value": 2.0, "checkpoint": "checkpoints/step_3", "model": "best"}
    assert run.keeper.summary() == {"best_step": 3, "best_metric": "reward", "best_value": 2.0}


def test_the_best_of_before_is_there_until_the_next_one_is(tmp_path):
    run = Run(tmp_path)
    run.evaluate(1, reward=1.0)
    run.evaluate(2, reward=2.0, keep=False)
    assert run.checkpoints() == {"step_1", "step_2"} and run.found() == (1, 1)


def test_a_run_that_ended_before_it_could_export_does_so_when_it_goes_on(tmp_path):
    run = Run(tmp_path)
    run.evaluate(1, reward=1.0)
    run.evaluate(2, reward=2.0, keep=False)
    again = Run(tmp_path, run.best.state_dict())
    assert again.resume(2) is None and again.found() == (2, 2)
    again.evaluate(3, reward=0.0)
    assert again.checkpoints() == {"step_2", "step_3"}


def test_the_best_is_not_pruned_by_a_resumed_run_either(tmp_path):
    run = Run(tmp_path)
    run.evaluate(1, reward=2.0)
    run.evaluate(2, reward=1.0)
    again = Run(tmp_path, run.best.state_dict())
    assert again.resume(2) is None
    again.evaluate(3, reward=1.0)
    assert again.checkpoints() == {"step_1", "step_3"} and again.found() == (1, 1)


def test_resuming_before_the_best_says_so_and_leaves_it(tmp_path):
    run = Run(tmp_path)
    run.evaluate(1, reward=1.0)
    run.evaluate(2, reward=0.5)
    early = run.best.state_dict()
    run.evaluate(3, reward=2.0)
    again = Run(tmp_path, early)
    assert "step 2 records step 1 as the best, but best/ contains the model of step 3" in again.resume(2)
    assert again.found() == (3, 3)
    again.evaluate(3, reward=2.0)
    assert again.found() == (3, 3) and again.best.step == 3


@pytest.mark.parametrize(("mode", "values", "best"), [
    ("max", [1.0, NAN, 3.0, 3.0, 2.0], 3), ("min", [5.0, 4.0, 4.0, 6.0, NAN], 2), ("max", [NAN, 1.0], 2),
])
def test_better_is_better_and_nothing_else(tmp_path, mode, values, best):
    run = Run(tmp_path, best_mode=mode)
    for step, value in enumerate(values, start=1):
        run.evaluate(step, reward=value)
    assert run.best.step == best


def test_a_run_that_never_beats_its_start_has_no_best_model(tmp_path):
    run = Run(tmp_path)
    for step in range(3):
        run.evaluate(step, reward=-float(step))
    assert not run.directory.best.exists() and not run.directory.best_mark.exists()
    assert run.keeper.summary()["best_step"] == 0 and run.checkpoints() == {"step_2"}


def test_another_metric_begins_anew(tmp_path):
    run = Run(tmp_path)
    run.evaluate(1, reward=100.0)
    again = Run(tmp_path, run.best.state_dict(), metric="gold")
    assert again.resume(1) is None and again.keeper.summary() == {}
    assert again.evaluate(2, gold=0.5) and again.found() == (2, 2)


def test_another_direction_begins_anew(tmp_path):
    run = Run(tmp_path)
    for step, reward in enumerate((1.0, 3.0)):
        run.evaluate(step, reward=reward)
    again = Run(tmp_path, run.best.state_dict(), best_mode="min")
    again.evaluate(2, reward=5.0)
    assert again.best.step == 2 and again.best.value == 5.0


def test_an_unknown_metric_names_those_there_are(tmp_path):
    with pytest.raises(ConfigError, match=r"best_metric='rewad' is not a metric of this run .kl, reward"):
        Run(tmp_path, metric="rewad").evaluate(0, reward=1.0, kl=0.0)


def test_off_it_does_nothing(tmp_path):
    run = Run(tmp_path, metric=None)
    assert not run.evaluate(1, reward=1.0) and run.resume(1) is None and run.keeper.summary() == {}
