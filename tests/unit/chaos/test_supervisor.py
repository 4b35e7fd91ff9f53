"""The supervisor resumes the driver as planned, kills one that hangs, and finds leftover processes."""

import signal

import pytest

from chaos import supervisor
from chaos.__main__ import _exit_on_sigterm
from chaos.faults import KILL, Fault
from chaos.kinds import checkpoints
from chaos.supervisor import run

FAULTS = [Fault(1, "generator_kill", 1), Fault(2, "driver_kill", 2), Fault(3, "checkpoint_flip", 2),
          Fault(4, "reward_kill", 3)]


@pytest.fixture
def made(tmp_path, monkeypatch):
    """made(script, faults) -> the record of a run whose driver follows the script, a line for each start."""
    monkeypatch.setattr(supervisor, "DRIVER", "tests.unit.chaos.stub_driver")
    monkeypatch.setattr(supervisor, "GONE_S", 1.0)
    (tmp_path / "run").mkdir()

    def make(script, faults=(), **settings):
        (tmp_path / "STUB.txt").write_text("\n".join(script))
        return run(tmp_path / "run.yaml", tmp_path / "run", faults, **settings)

    return make


def test_a_driver_gets_the_faults_up_to_its_end_and_its_successor_the_others(made):
    lines = []
    record = made(["die", "well"], FAULTS, on_injection=lines.append)
    assert [(start.code, start.expected) for start in record.starts] == [(-KILL, -KILL), (0, 0)]
    assert [start.log.read_text() for start in record.starts] == ["die\n", "well --resume\n"]
    assert record.injections.injected() == {1, 2, 4}, "there was no checkpoint to damage"
    assert lines[1] == "[2/4] driver_kill: as planned" and record.left == []


def test_a_driver_is_resumed_with_the_same_faults_after_an_unplanned_end(made):
    record = made(["crash", "well"], FAULTS[:1])
    assert [(start.code, start.expected) for start in record.starts] == [(7, 0), (0, 0)]
    assert record.injections.injected() == {1} and record.starts[0].last_words() == "crash"


def test_a_run_that_crashes_repeatedly_is_given_up(made):
    record = made(["crash"] * 5)
    assert len(record.starts) == supervisor.MOST_SURPRISES + 1


def test_a_driver_that_hangs_is_killed_and_recorded(made, monkeypatch):
    monkeypatch.setattr(supervisor, "WEDGE_S", 2.0)
    record = made(["hang", "well"])
    assert [start.wedged for start in record.starts] == [True, False]


def test_a_process_that_outlives_its_driver_is_named_and_killed(made):
    import psutil

    record = made(["leave"])
    pid = int(record.starts[0].log.read_text().split()[1])
    (left,) = record.left
    assert left.startswith(f"process {pid} (") and left.endswith("after start 1")
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=5)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_an_interrupted_supervisor_kills_the_driver(made, monkeypatch, tmp_path):
    import psutil

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(supervisor.RunRecord, "report_injections", interrupted)
    record = made(["hang", "well"])
    assert isinstance(record.interruption, KeyboardInterrupt) and len(record.starts) == 1
    assert [p.pid for p in psutil.Process().children() if "stub_driver" in " ".join(p.cmdline())] == []


def test_a_supervisor_interrupted_between_two_drivers_has_the_record_of_the_first(made, monkeypatch):
    def interrupted(_):
        raise SystemExit(143)

    monkeypatch.setattr(supervisor, "_kill_leftovers", interrupted)
    record = made(["die", "well"], FAULTS)
    assert isinstance(record.interruption, SystemExit) and [start.code for start in record.starts] == [-KILL]


def test_a_second_sigterm_is_ignored():
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit):
            _exit_on_sigterm()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_damage_does_not_wait_for_a_message_that_is_still_to_be_lost(made, monkeypatch):
    damaged = []
    monkeypatch.setattr(checkpoints, "damage", lambda fault, _: damaged.append(fault.number))
    made(["die", "well"], [Fault(1, "driver_kill", 1), Fault(2, "request_lost", 1), Fault(3, "checkpoint_flip", 1)])
    assert damaged == [3]


def test_a_driver_heeds_hangups_also_under_nohup(made, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        record = made(["hangup", "well"])
    finally:
        signal.signal(signal.SIGHUP, before)
    assert record.starts[0].code == -signal.SIGHUP
