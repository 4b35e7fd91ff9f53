"""What was cut off goes on when it was replaced; only what was stopped until then and ended since counts as come back.
"""

import subprocess
import sys

import psutil
import pytest

from chaos import partition
from chaos.outcome import outcomes
from chaos.partition import come_back
from chaos.plan import Fault
from chaos.strikes import Strikes

FAULT = Fault(1, "partition", 1)


@pytest.fixture
def stopped(monkeypatch):
    """stopped(seconds) -> a process that is stopped, and ends so long after it goes on."""
    for name, seconds in {"LEASE_S": 0.3, "GIVEN_UP_S": 1.0, "HEARD_S": 1.5}.items():
        monkeypatch.setattr(partition, name, seconds)
    made = []

    def make(seconds):
        code = f"import time; print(1, flush=True); [time.sleep(0.01) for _ in range({int(seconds * 100)})]"
        made.append(subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE))
        made[-1].stdout.readline()
        process = psutil.Process(made[-1].pid)
        process.suspend()
        return process

    yield make
    for process in made:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("seconds, replaced, back", [(0.1, True, True), (60, True, False), (0.1, False, False)])
def test_it_must_be_replaced_meanwhile_and_end_by_itself_afterwards(tmp_path, stopped, seconds, replaced, back):
    strikes, process = Strikes(tmp_path / "strikes.jsonl"), stopped(seconds)
    come_back(strikes, FAULT, [process], lambda: replaced)
    assert [line["event"] for line in strikes.read()] == ["recovered"] * back
    assert not process.is_running() or process.status() != psutil.STATUS_STOPPED, "it goes on in any case"


def test_one_that_went_on_before_it_was_replaced_was_not_cut_off(tmp_path, stopped):
    strikes, process = Strikes(tmp_path / "strikes.jsonl"), stopped(0.1)
    process.resume()
    come_back(strikes, FAULT, [process], lambda: True)
    assert strikes.read() == []


@pytest.mark.parametrize("back", [True, False])
def test_a_node_that_did_not_come_back_was_no_partition(made_up, back):
    made_up.start(100, 200, 0, 0)
    number = made_up.struck("partition", 110, role="generator", pid=7)
    made_up.event("generator", 7, 116, 12.0)
    if back:
        made_up.line("recovered", 130, fault=number)
    (outcome,) = outcomes(made_up.record)
    assert outcome.survived is back and (back or "was not stopped until it was replaced" in outcome.problem)
