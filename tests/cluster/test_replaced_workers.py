"""One run that loses a generator and a rank of a learner: both are replaced, and the result is the undisturbed run's,
bit for bit. More victims, and workers that hang, are in test_worker_losses.py and test_lost_learners.py."""

import signal

import psutil
import pytest

from rlhf_ray.observability.faults import read_faults
from tests.cluster.faults import LearnerFaults, WorkerFault, run_with_learner_faults, worker_faults
from tests.cluster.processes import descendants
from tests.cluster.resumed import assert_equal_runs

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def disturbed(configure, tmp_path_factory):
    """(directory, fault of the generator, faults of the learner) of a run. A generator is killed after the first
    update, and one of the policy's two ranks in the third update, after the first checkpoint."""
    directory = tmp_path_factory.mktemp("replaced") / "run"
    generator = WorkerFault("generator/0", "generate", 1, signal.SIGKILL)
    learner = LearnerFaults({2: ("policy", 1, signal.SIGKILL)})
    with worker_faults(generator):  # the only generator, so that the run waits for the next one
        run_with_learner_faults(learner, configure, directory, generator={"workers": 1})
    return directory, generator, learner


def test_a_killed_generator_is_replaced(disturbed):
    directory, fault, _ = disturbed
    (event,) = [event for event in read_faults(directory / "faults.jsonl") if event["role"] == "generator"]
    assert (event["rank"], event["kind"], event["pid"]) == (0, "died", fault.pids[0])
    assert event["recovery_s"] > 0 and event["redispatched"] > 0


def test_a_killed_learner_rank_is_replaced_from_the_last_checkpoint(disturbed):
    directory, _, faults = disturbed
    [(step, pid, updating)] = faults.hit
    assert (step, updating) == (2, True)
    (event,) = [event for event in read_faults(directory / "faults.jsonl") if event["role"] == "policy_learner"]
    assert (event["rank"], event["kind"]) == (1, "died") and not psutil.pid_exists(pid)


def test_the_run_ends_as_the_undisturbed_one_bit_for_bit(finished, disturbed):
    assert_equal_runs(finished.directory, disturbed[0])


def test_no_process_is_left(disturbed):
    assert descendants() == []
