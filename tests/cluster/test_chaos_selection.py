"""A few faults of `make chaos`, always the same, which need no privilege: a generator and a rank of the policy are
killed at work, and, in a slow variant, the driver ends at every failpoint. More victims, and workers that hang, are in
test_worker_losses.py and test_lost_learners.py."""

import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from chaos.campaign import evaluate
from chaos.faults import Fault
from chaos.invariants import Books, violations
from chaos.supervisor import run
from rlhf_ray.failpoints import EXIT_CODE, POINTS

pytestmark = pytest.mark.cluster
KILLED = [
    Fault(1, "generator_kill", step=1, rank=1, sightings=2, delay_s=0.01),
    Fault(2, "policy_kill", step=2, rank=1),
]
ENDS = ["checkpoint_uncommitted", *(name for name in POINTS if name != "checkpoint_uncommitted")]
"""Every failpoint; first the one that leaves a checkpoint to go on from."""
ENDED = [Fault(number, f"exit_at_{name}", step=1 if number == 1 else 2) for number, name in enumerate(ENDS, start=1)]


def looked_at(faults, configure, finished, tmp_path_factory):
    directory = tmp_path_factory.mktemp("chaos") / "run"
    return evaluate(run(configure(directory), directory, faults), finished.directory, reproducible=True)


@pytest.fixture(scope="module")
def selection(configure, finished, tmp_path_factory):
    """The run of `finished` with two workers killed, looked through."""
    return looked_at(KILLED, configure, finished, tmp_path_factory)


def test_each_fault_met_its_victim_in_the_state_that_was_meant_and_was_survived(selection):
    assert [(outcome.fault.kind, outcome.problem) for outcome in selection.outcomes] == [
        (fault.kind, "") for fault in KILLED]
    assert [start.code for start in selection.record.starts] == [0]
    assert all(outcome.detection_s < 30 for outcome in selection.outcomes)


@pytest.mark.slow
def test_a_driver_that_ends_at_every_failpoint_in_turn_ends_as_the_undisturbed_one(
        configure, finished, tmp_path_factory):
    found = looked_at(ENDED, configure, finished, tmp_path_factory)
    assert [(outcome.fault.kind, outcome.problem) for outcome in found.outcomes] == [
        (fault.kind, "") for fault in ENDED]
    assert [start.code for start in found.record.starts] == [EXIT_CODE] * len(POINTS) + [0]
    assert all("resuming after step 2" in start.log.read_text() for start in found.record.starts[1:])
    assert all(outcome.recovery_s > 1 for outcome in found.outcomes)
    assert found.broken == [] and (found.books.lost, found.books.duplicated) == (0, 0)


def test_every_invariant_holds_and_the_result_is_the_undisturbed_run_s(selection):
    assert selection.broken == []
    assert (selection.books.lost, selection.books.duplicated) == (0, 0) and selection.books.again > 0


def spoil_the_weights(run):
    weights = run / "model/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)


def drop_a_row(run):
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(row for row in rows if '"step": 3' not in row and '"step":3' not in row))


def forget_a_sample(run):
    change_ledger(run, "DELETE FROM samples WHERE rowid = (SELECT min(rowid) FROM samples)")


def train_on_something_old(run):
    change_ledger(run, "UPDATE samples SET version = 0 WHERE step = 3")


def change_ledger(run, statement):
    with closing(sqlite3.connect(run / "ledger.sqlite")) as db:
        db.execute(statement)
        db.commit()


def leave_a_checkpoint_unfinished(run):
    (run / "checkpoints/.tmp-step_6-1").mkdir()


@pytest.mark.parametrize("harm, said", [
    (spoil_the_weights, "model/model.safetensors is not that of the undisturbed run"),
    (drop_a_row, "rows of metrics are of the updates [1, 2, 4]"), (forget_a_sample, "1 are lost"),
    (train_on_something_old, "nothing older than 0 versions was trained on"),
    (leave_a_checkpoint_unfinished, "left behind: checkpoints/.tmp-step_6-1")])
def test_an_invariant_that_does_not_hold_is_told(selection, finished, tmp_path, harm, said):
    copy = shutil.copytree(selection.record.directory, tmp_path / "run")
    record = replace(selection.record, directory=copy)
    assert violations(record, finished.directory) == [] and Books.of(record).lost == 0
    harm(copy)
    assert any(said in line for line in violations(record, finished.directory))
