"""How the bare passes of a step are added up."""

import pytest

from benchmarks.side_process import Turn
from benchmarks.step_vs_parts import _phase_cost, seconds_of_parts, tokens_a_step


def turn(seconds, amount):
    return Turn(amount, seconds, seconds, [])


@pytest.mark.parametrize(("phase", "cost"), [
    ("generation", 4 / 300),  # the slower engine, for the tokens of both
    ("forwards", (2 * 2 / 100 + 2 * 4 / 200) / 2),  # two passes each, of half the amount; both cores
    ("updates", 2 / 100),  # each process trains on all tokens
])
def test_a_phase_lasts_as_long_as_its_processes_allow(phase, cost):
    assert _phase_cost(phase, [turn(2.0, 100.0), turn(4.0, 200.0)]) == pytest.approx(cost)


def test_costs_count_for_the_tokens_of_the_loops_own_steps():
    rows = [{"response/length": length, "throughput/tokens_per_second": rate, "time/step": 2.0}
            for length, rate in ((10.0, 700.0), (20.0, 900.0))]
    tokens = tokens_a_step(rows, samples=8)
    assert tokens == (15 * 8, 1600)
    costs = {"generation": 0.01, "forwards": 0.001, "updates": 0.002}
    assert seconds_of_parts(costs, tokens, epochs=3) == pytest.approx(
        {"generation": 1.2, "forwards": 1.6, "updates": 9.6})
