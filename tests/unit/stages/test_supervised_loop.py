"""When a supervised run saves: by time, and the step whose evaluation fails. Learners are stand-ins; checkpoints and
metrics are real."""

import asyncio
from types import SimpleNamespace

import pytest

from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.config.training_loop import LoggingConfig
from rlhf_ray.coordinator.recovery import SavePace
from rlhf_ray.coordinator.stop import StopRequest
from rlhf_ray.errors import CheckpointError, RLHFError, TrainingError, WorkerError, WorkerLost
from rlhf_ray.observability.metrics import MetricsWriter, read_metrics
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.records import UpdateStats
from rlhf_ray.roles.learner_state import SaveProgress
from rlhf_ray.stages.supervised_loop import SupervisedRun
from tests.unit.stages.test_supervised_resume import config_of


class Learners:
    """One rank that remembers its step. `fails`: method -> (step, error)."""

    role = "sft_learner"

    def __init__(self, now=None):
        self.step, self.fails, self.stuck, self.now = 0, {}, False, now

    def call_all(self, method, step):
        async def value():
            self._maybe_fail(method.__name__, step)
            self.step = step
            if self.now is not None:
                self.now.append(self.now[-1] + 60)
            return UpdateStats(step=step, applied=1, skipped=0, seconds=0.1, tokens=1, metrics={"loss": 1.0 / step})

        return [SimpleNamespace(value=value)]

    async def values(self, method, *given):
        method = method.__name__
        self._maybe_fail(method, self.step)
        if method == "save_progress":
            if self.stuck:
                await asyncio.sleep(60)
            return [SaveProgress(True, (0, 0), "nothing")]
        if method == "load":
            self.step = int(given[0].split("step_")[1].split("/")[0])
        return [{"loss": 10.0 - self.step}] if method == "evaluate" else [None]

    def _maybe_fail(self, method, step):
        at, error = self.fails.get(method, (None, None))
        if at == step:
            raise error


class Run:
    """A run of 9 steps in a directory, evaluated every 2."""

    def __init__(self, place, learners=None, kept=None, **sections):
        self.said = []
        self.learners = learners or Learners()
        config = config_of(place, **sections)
        config = config.model_copy(update={"training": config.training.model_copy(update={"eval_every": 2})})
        self.directory = RunDirectory.create(place, resume=True)
        self.store = CheckpointStore(self.directory.checkpoints, 9)
        metrics = MetricsWriter(place, LoggingConfig(tensorboard=False, ray_metrics=False), kept)
        progress = SimpleNamespace(note=self.said.append, warn=self.said.append, update=lambda *_, **__: None)
        self.stop = StopRequest(self.said.append)
        self.run = SupervisedRun(config, "sft", self.learners, self.directory, self.store, metrics, progress, self.stop,
                                 lambda *_: None, [], {})

    def saved(self):
        return sorted(step for step, _ in self.store.steps())

    def train(self, start=None):
        async def run():
            if start is not None:
                await self.run.restore(self.store.path(start))
            return await asyncio.wait_for(self.run.train(), 20)

        return asyncio.run(run())

    def measured(self):
        """Rows of metrics without times."""
        return [{name: value for name, value in row.items() if not name.startswith(("time", "throughput"))}
                for row in read_metrics(self.directory.path)]


@pytest.mark.parametrize("error", [
    RLHFError("the evaluation failed"), WorkerError("sft_learner/0 failed in evaluate: out of memory", "sft_learner")])
def test_an_error_of_an_evaluation_saves_its_step_and_a_resumed_run_is_the_same(tmp_path, error):
    whole = Run(tmp_path / "whole")
    whole.train()
    run = Run(tmp_path / "run")
    run.learners.fails["evaluate"] = (4, error)
    with pytest.raises(type(error)) as caught:
        run.train()
    assert caught.value is error and run.saved() == [4]
    assert run.said[-1] == "an error ends the run; step 4 is saved, and --resume continues from it"
    again = Run(tmp_path / "run", kept=4)
    again.train(start=4)
    assert again.measured() == whole.measured() and len(whole.measured()) == 9 + 5


def test_an_unfinished_evaluation_of_the_last_step_is_made_by_the_resumed_run(tmp_path):
    run = Run(tmp_path, checkpoint={"best_metric": "loss"})
    run.learners.fails["evaluate"] = (9, RLHFError("the evaluation failed"))
    with pytest.raises(RLHFError, match="the evaluation failed"):
        run.train()
    assert run.saved()[-1] == 9
    again = Run(tmp_path, kept=9, checkpoint={"best_metric": "loss"})
    assert again.train(start=9) == {"loss": 1.0} and again.run.best.step == 9


@pytest.mark.parametrize(("method", "at", "error"), [
    ("update", 4, TrainingError("no loss was finite")),
    ("evaluate", 4, WorkerLost("sft_learner/0 died", "sft_learner")),
    ("evaluate", 4, CheckpointError("the disk is full"))])
def test_an_error_after_which_the_learners_may_be_between_two_steps_saves_nothing(tmp_path, method, at, error):
    run = Run(tmp_path)
    run.learners.fails[method] = (at, error)
    with pytest.raises(type(error)):
        run.train()
    assert run.saved() == []
    assert not [text for text in run.said if "an error ends" in text]


def test_an_error_of_the_first_evaluation_has_nothing_to_save(tmp_path):
    run = Run(tmp_path, checkpoint={"best_metric": "loss"})
    run.learners.fails["evaluate"] = (0, RLHFError("the evaluation failed"))
    with pytest.raises(RLHFError, match="the evaluation failed"):
        run.train()
    assert run.saved() == []


def test_a_checkpoint_that_fails_too_is_reported_beside_the_error(tmp_path):
    run = Run(tmp_path)
    run.learners.fails = {"evaluate": (4, RLHFError("the evaluation failed")),
                          "begin_save": (4, CheckpointError("the disk is full"))}
    with pytest.raises(RLHFError, match="the evaluation failed"):
        run.train()
    assert run.said[-1] == "an error ends the run, and step 4 cannot be saved: the disk is full"


def test_a_rank_that_still_evaluates_is_not_waited_for_longer_than_a_heartbeat(tmp_path, monkeypatch):
    run = Run(tmp_path)
    run.learners.fails["evaluate"], run.learners.stuck = (4, RLHFError("the evaluation failed")), True
    config = run.run.config
    run.run.config = config.model_copy(update={
        "cluster": config.cluster.model_copy(update={"heartbeat_timeout_s": 0.1})})
    with pytest.raises(RLHFError, match="the evaluation failed"):
        run.train()
    assert "a rank of sft_learner did not end its evaluation within cluster.heartbeat_timeout_s=0.1" in run.said[-1]
    assert run.saved() == []


@pytest.mark.parametrize(("minutes", "every", "saved"), [
    (0, 0, [9]), (0.001, 0, [2, 4, 6, 8, 9]), (4, 0, [4, 8, 9]), (4, 3, [3, 6, 9])])
def test_checkpoints_by_time_come_besides_those_by_steps(tmp_path, minutes, every, saved):
    """A step takes a minute. Updates that were submitted ahead are made before a checkpoint that is due meanwhile."""
    plain = Run(tmp_path / "plain")
    plain.train()
    now = [0.0]
    run = Run(tmp_path / "run", Learners(now), checkpoint={"every": every, "keep": 9})
    run.run._pace = SavePace(minutes, lambda: now[-1])
    run.train()
    assert run.measured() == plain.measured() and run.saved() == saved
