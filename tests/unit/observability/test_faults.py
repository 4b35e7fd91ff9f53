"""faults.jsonl: who was lost, as the status and the report tell it."""

import pytest
from rich.console import Console

from rlhf_ray.errors import DataError, WorkerError
from rlhf_ray.observability.faults import FaultLog, in_one_line, read_faults
from rlhf_ray.observability.report import write_report
from rlhf_ray.observability.status_page import status_page


def event(role, rank, kind, recovery_s=1.0):
    return {"role": role, "rank": rank, "kind": kind, "recovery_s": recovery_s}


@pytest.fixture
def faults(tmp_path):
    """A run in which three workers were lost four times."""
    log = FaultLog(tmp_path / "faults.jsonl")
    for one in (event("generator", 0, "died"), event("generator", 1, "hung", None), event("generator", 0, "died")):
        log.write(one)
    failed = WorkerError("policy/1 failed in update: out of memory")
    failed.role = "policy"
    log.learners_lost(failed, 3.0)
    return tmp_path / "faults.jsonl"


TOLD = "generator/0 (died 2 times), generator/1 (hung, not back), policy (failed)"


def test_losses_are_told_in_one_line(faults):
    assert in_one_line(read_faults(faults)) == TOLD


def test_nothing_is_said_where_nobody_was_lost(tmp_path):
    assert in_one_line(read_faults(tmp_path / "faults.jsonl")) == ""


def test_status_and_report_name_who_was_lost(faults):
    (faults.parent / "metrics.jsonl").write_text('{"step": 1, "time": 1.0}\n')
    console = Console(width=140, color_system=None)
    with console.capture() as captured:
        console.print(status_page(faults.parent))
    assert f"lost workers: {TOLD} (faults.jsonl)" in captured.get()
    assert f"Lost on the way: {TOLD}." in write_report(faults.parent).read_text()


def test_a_line_that_a_crash_tore_is_passed_over(faults):
    with faults.open("a") as file:
        file.write('{"time": 1.0, "role": "gen')
    assert len(read_faults(faults)) == 4


def test_what_a_crash_tore_goes_when_the_next_event_comes(faults):
    with faults.open("a") as file:
        file.write('{"time": 1.0, "role": "gen')
    FaultLog(faults).write(event("critic", 0, "died"))
    assert [e["role"] for e in read_faults(faults)][-2:] == ["policy", "critic"] and len(read_faults(faults)) == 5


def test_a_file_that_cannot_be_written_is_told_of_and_ends_nothing(tmp_path):
    said = []
    log = FaultLog(tmp_path / "away/faults.jsonl", said.append)
    log.write(event("generator", 1, "hung"), seconds_down=2.0)
    assert "faults.jsonl cannot be written (No such file or directory)" in said[0] and '"generator"' in said[0]
    assert log.take()["faults/seconds_down"] == 2.0


def test_a_damaged_line_is_named(faults):
    faults.write_text("{}\n" + faults.read_text())
    with pytest.raises(DataError, match=r"faults.jsonl, line 1: not a lost worker: b'\{\}'"):
        read_faults(faults)


def test_what_dropped_rows_counted_is_told_in_the_next_row(tmp_path):
    log = FaultLog(tmp_path / "faults.jsonl")
    log.lost("a generator")
    log.write({"role": "generator", "redispatched": 4}, seconds_down=2.0)
    log.damaged("generator", 1, 1, "tensor 'a' has digest 1, expected 2", 0.5)
    row = {"step": 3, **log.take()}
    log.count_again([row, {"step": 3, "eval/reward": 1.0}, {"step": 4, "faults/lost_workers": None}])
    log.lost("a learner")
    assert log.take() == {"faults/lost_workers": 2.0, "faults/seconds_down": 2.0, "faults/redispatched": 4.0,
                          "faults/damaged_buckets": 1.0}


def test_a_line_is_about_workers_that_were_lost_each_loss_once():
    """Not about damaged buckets and restarted tasks; a worker that was missing for some time has two lines."""
    lost = {"role": "generator", "rank": 1, "incarnation": 1, "kind": "died", "lost_at": 5.0}
    events = [{"role": "generator", "rank": 0, "kind": "damaged"}, {"role": "coordinator", "kind": "failed"},
              {**lost, "recovery_s": None}, {**lost, "recovery_s": 9.0}]
    assert in_one_line(events[:3]) == "generator/1 (died, not back)"
    assert in_one_line(events) == "generator/1 (died)"
