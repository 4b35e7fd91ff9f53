"""Ranks of learners that are killed or stopped in the middle of an update: the run goes on from its last checkpoint,
and ends as the undisturbed one does, bit for bit."""

import signal

import psutil
import pytest

from rlhf_ray.errors import WorkerError
from tests.cluster.faults import LearnerFaults, run_with_learner_faults
from tests.cluster.processes import descendants
from tests.cluster.resumed import assert_equal_runs

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


STOPPED = {2: ("policy", 1, signal.SIGSTOP)}
"""One of two ranks, after the first checkpoint."""
TWICE = {1: ("critic", 0, signal.SIGSTOP), 2: ("policy", 1, signal.SIGKILL)}
"""One stopped before the first checkpoint, and one of the next learners killed after it."""
ENDS = {signal.SIGSTOP: ("stopped", 60), signal.SIGKILL: ("gone", 30)}
"""What becomes of a process, and how soon that is noticed: by the lease, not by the call's deadline of 120 s."""


@pytest.fixture(scope="module", params=[STOPPED, TWICE], ids=["stopped", "twice"])
def disturbed(request, configure, tmp_path_factory):
    """Two ranks of each learner, one of which is lost, or one after the other."""
    faults = LearnerFaults(dict(request.param))
    directory = tmp_path_factory.mktemp("lost") / "run"
    run_with_learner_faults(faults, configure, directory, cluster={"heartbeat_timeout_s": 5})
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


ONE_RANK = {"policy": {"workers": 1, "zero_stage": 0}, "critic": {"workers": 1, "zero_stage": 1}, "run": {"steps": 3}}


@pytest.fixture(scope="module")
def undisturbed_alone(configure, tmp_path_factory):
    """A run with one rank of each learner."""
    directory = tmp_path_factory.mktemp("alone") / "run"
    return run_with_learner_faults(LearnerFaults({}), configure, directory, **ONE_RANK)


@pytest.mark.parametrize(("role", "number"), [("policy", signal.SIGSTOP), ("critic", signal.SIGKILL)])
def test_a_learner_of_one_rank_comes_back_too(undisturbed_alone, configure, tmp_path, role, number):
    faults = LearnerFaults({2: (role, 0, number)})
    directory = run_with_learner_faults(faults, configure, tmp_path / "run", cluster={"heartbeat_timeout_s": 5},
                                        **ONE_RANK)
    assert [(step, updating) for step, _, updating in faults.hit] == [(2, True)]
    assert_equal_runs(undisturbed_alone, directory)


def test_learners_that_are_lost_again_and_again_end_the_run(configure, tmp_path):
    faults = LearnerFaults({2: ("policy", 0, signal.SIGKILL)}, always=True)
    with pytest.raises(WorkerError, match="lost 2 times since the checkpoint of step 2 .*max_learner_restarts=1"):
        run_with_learner_faults(faults, configure, tmp_path / "run", **ONE_RANK)
    assert [step for step, *_ in faults.hit] == [2, 2] and descendants() == []
