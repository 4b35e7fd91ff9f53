"""What the injector does to the loop besides striking."""

from types import SimpleNamespace

import pytest

from chaos.injector import Injector
from chaos.plan import Fault
from chaos.strikes import Strikes


@pytest.mark.parametrize("step, down, waits", [
    (5, ("generator", 1), True), (4, ("generator", 1), False), (5, ("generator", 0), False), (5, None, False)])
def test_training_waits_while_the_victim_of_a_fault_that_is_due_is_down(tmp_path, step, down, waits):
    injector = Injector([Fault(1, "generator_kill", step=5, rank=1)], Strikes(tmp_path / "strikes.jsonl"))
    coordinator = SimpleNamespace(state=SimpleNamespace(step=step), team=SimpleNamespace(
        healing=SimpleNamespace(down={down: None} if down else {})))
    assert injector._must_wait(coordinator) is waits


def test_training_waits_for_nobody_when_no_fault_is_left(tmp_path):
    injector = Injector([Fault(1, "request_lost", step=1)], Strikes(tmp_path / "strikes.jsonl"))
    assert not injector._must_wait(SimpleNamespace())
