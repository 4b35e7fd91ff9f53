"""Ranks of learners that are killed or stopped in the middle of an update: the run goes on from its last checkpoint,
and ends as the undisturbed one does, bit for bit."""

import asyncio
import signal
import time
from dataclasses import dataclass, field

import psutil
import pytest

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.learning import Learning
from rlhf_ray.errors import WorkerError
from rlhf_ray.observability.metrics import read_metrics
from tests.cluster.processes import descendants
from tests.cluster.resumed import CLOCKS, TRAFFIC, samples, without

pytestmark = pytest.mark.cluster


@dataclass
class Faults:
    """Signals sent to ranks while they update, each once."""

    plan: dict[int, tuple[str, int, signal.Signals]]
    """By step (from 0): role, rank and signal."""
    always: bool = False
    """Whether one is sent again when its step comes again."""
    hit: list[tuple[int, int, bool]] = field(default_factory=list)
    """Of each that was sent: step, pid, and whether the rank was updating."""
    ends: list[tuple[str, float]] = field(default_factory=list)
    """When its update failed: what had become of each process, and seconds since the update began."""

    def wrap(self, update_all):
        """`Learning._update_all` with the fault of its step, a moment after the update began."""
        async def disturbed(learning, lease):
            step = learning._state.step
            fault = self.plan.get(step) if self.always else self.plan.pop(step, None)
            if fault is None:
                return await update_all(learning, lease)
            role, rank, number = fault
            group, clock = getattr(learning._roles, role), learning._roles.clock
            process = psutil.Process(group.processes(rank).pid)

            def strike():
                busy = {(task.role, task.worker, task.phase) for task in clock.under_way}
                self.hit.append((step, process.pid, (group.role, rank, f"{role}_update") in busy))
                process.send_signal(number)

            asyncio.get_running_loop().call_later(0.05, strike)
            began = time.monotonic()
            try:
                return await update_all(learning, lease)
            finally:
                took = time.monotonic() - began
                if number == signal.SIGKILL:  # the system takes it away a moment after Ray has told of it
                    await asyncio.to_thread(psutil.wait_procs, [process], timeout=10)
                self.ends.append((process.status() if process.is_running() else "gone", took))

        return disturbed


def run_with(faults, configure, directory, overrides=(), **sections):
    """The run with these faults; its directory."""
    from rlhf_ray.stages import ppo

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learning, "_update_all", faults.wrap(Learning._update_all))
        ppo.run(load(PPOConfig, configure(directory, **sections), list(overrides)))
    return directory


def assert_equal_runs(undisturbed, disturbed):
    """The same weights, rows of metrics, ledger, texts and evaluations."""
    for model in ("model", "model_ema"):
        if (undisturbed / model).is_dir():
            first, second = ((d / model / "model.safetensors").read_bytes() for d in (undisturbed, disturbed))
            assert first == second, model
    rows = [without(read_metrics(d), *CLOCKS, TRAFFIC) for d in (undisturbed, disturbed)]
    assert rows[0] == rows[1] and len(rows[0]) > 3
    assert samples(undisturbed) == samples(disturbed)
    assert (undisturbed / "evaluation.json").read_bytes() == (disturbed / "evaluation.json").read_bytes()
    texts = [sorted(p.name for p in (d / "samples").iterdir()) for d in (undisturbed, disturbed)]
    assert texts[0] == texts[1]


STOPPED = {2: ("policy", 1, signal.SIGSTOP)}
"""One of two ranks, after the first checkpoint."""
TWICE = {1: ("critic", 0, signal.SIGSTOP), 2: ("policy", 1, signal.SIGKILL)}
"""One stopped before the first checkpoint, and one of the next learners killed after it."""
ENDS = {signal.SIGSTOP: ("stopped", 60), signal.SIGKILL: ("gone", 30)}
"""What becomes of a process, and how soon that is noticed: by the lease, not by the call's deadline of 120 s."""


@pytest.fixture(scope="module", params=[STOPPED, pytest.param(TWICE, marks=pytest.mark.slow)], ids=["stopped", "twice"])
def disturbed(request, configure, tmp_path_factory):
    """Two ranks of each learner, one of which is lost, or one after the other."""
    faults = Faults(dict(request.param))
    directory = tmp_path_factory.mktemp("lost") / "run"
    run_with(faults, configure, directory, cluster={"heartbeat_timeout_s": 5})
    return directory, faults, request.param


def test_the_faults_met_their_victims_in_the_update_they_were_meant_for(disturbed):
    _, faults, plan = disturbed
    assert [(step, updating) for step, _, updating in faults.hit] == [(step, True) for step in plan]
    assert faults.plan == {}
    for (became, after), (*_, number) in zip(faults.ends, plan.values(), strict=True):
        assert became == ENDS[number][0] and after < ENDS[number][1]
    assert not any(psutil.pid_exists(pid) for _, pid, _ in faults.hit), "the stopped one was ended for certain"


def test_the_run_ends_as_the_undisturbed_one_bit_for_bit(finished, disturbed):
    assert_equal_runs(finished.directory, disturbed[0])


def test_nothing_of_the_old_learners_is_left(disturbed):
    assert descendants() == []


ONE_RANK = {"policy": {"workers": 1, "zero_stage": 0}, "critic": {"workers": 1}, "run": {"steps": 3}}


@pytest.fixture(scope="module")
def undisturbed_alone(configure, tmp_path_factory):
    """A run with one rank of each learner."""
    directory = tmp_path_factory.mktemp("alone") / "run"
    return run_with(Faults({}), configure, directory, **ONE_RANK)


@pytest.mark.slow
@pytest.mark.parametrize(("role", "number"), [("policy", signal.SIGSTOP), ("critic", signal.SIGKILL)])
def test_a_learner_of_one_rank_comes_back_too(undisturbed_alone, configure, tmp_path, role, number):
    faults = Faults({2: (role, 0, number)})
    directory = run_with(faults, configure, tmp_path / "run", cluster={"heartbeat_timeout_s": 5}, **ONE_RANK)
    assert [(step, updating) for step, _, updating in faults.hit] == [(2, True)]
    assert_equal_runs(undisturbed_alone, directory)


@pytest.mark.slow
def test_learners_that_are_lost_again_and_again_end_the_run(configure, tmp_path):
    faults = Faults({2: ("policy", 0, signal.SIGKILL)}, always=True)
    with pytest.raises(WorkerError, match="lost 2 times since the checkpoint of step 2 .*cluster.max_rebuilds=1"):
        run_with(faults, configure, tmp_path / "run", **ONE_RANK)
    assert [step for step, *_ in faults.hit] == [2, 2] and descendants() == []
