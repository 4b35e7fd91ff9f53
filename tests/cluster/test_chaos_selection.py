"""A few faults of `make chaos`, always the same: a generator killed at work, the driver ended before a checkpoint has
its name, and an assembler killed after the resume."""

import pytest

from chaos.campaign import looked_through
from chaos.plan import Fault
from chaos.supervisor import run
from rlhf_ray.failpoints import EXIT_CODE

pytestmark = pytest.mark.cluster
FAULTS = [
    Fault(1, "generator_kill", step=1, rank=1, sightings=2, delay_s=0.01),
    Fault(2, "exit_at_checkpoint_unnamed", step=1, sightings=2),
    Fault(3, "assembler_kill", step=2, sightings=2),
]


@pytest.fixture(scope="module")
def selection(configure, finished, tmp_path_factory):
    """The run of `finished` among these faults, looked through."""
    directory = tmp_path_factory.mktemp("chaos") / "run"
    return looked_through(run(configure(directory), directory, FAULTS), finished.directory, same=True)


def test_each_fault_met_its_victim_in_the_state_that_was_meant_and_was_survived(selection):
    assert [(outcome.fault.kind, outcome.problem) for outcome in selection.outcomes] == [
        (fault.kind, "") for fault in FAULTS]
    killed, ended, _ = selection.outcomes
    assert killed.recovery_s > 1 and ended.recovery_s > 1


def test_the_driver_ended_at_its_failpoint_and_the_next_one_at_the_run_s_end(selection):
    assert [start.code for start in selection.course.starts] == [EXIT_CODE, 0]
    assert "resuming after step 2" in selection.course.starts[1].log.read_text()


def test_every_invariant_holds_and_the_result_is_the_undisturbed_run_s(selection):
    assert selection.broken == []
    assert (selection.books.lost, selection.books.duplicated) == (0, 0) and selection.books.again > 0
