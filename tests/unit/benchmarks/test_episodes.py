"""Figures of episodes from what their parts write."""

import pytest

from benchmarks import episodes


def test_ratios_are_of_the_same_row_and_the_value_is_their_median():
    rows = [{"episode_ms": 12.0, "engine_ms": 10.0, "within_ms": 11.0},
            {"episode_ms": 30.0, "engine_ms": 20.0, "within_ms": 29.0},
            {"episode_ms": 11.0, "engine_ms": 10.0, "within_ms": 10.5}]
    rates = [{"episodes": 90.0, "single": 100.0}]
    published = [{"cold_ms": 50.0, "first_ms": 25.0, "prefill_ms": 40.0, "tokens": 128, "episodes": 8}]
    found = episodes.of_turns({"turn": rows, "rate": rates, "publication": published},
                              {"rate": [{"episodes": 40.0, "single": 100.0}]})
    assert found["episode_turn"].repeats == pytest.approx([1.2, 1.5, 1.1]) and found["episode_turn"].value == 1.2
    assert found["episode_turn"].more == {"added_ms": 2.0, "outside_of_the_engine_ms": 1.0}
    assert found["episodes_per_single"].reached and found["episodes_per_single"].more["without_cache"] == 0.4
    assert found["publication_prefill"].value == 2.0


def test_the_growth_of_open_episodes_is_from_the_second_round_to_the_last():
    """By hand: 100 + 20 MB with ten open and 110 + 20 with 30 is half a MB for each of the 20."""
    rows = [{"open": number, "runner_mb": runner, "hosts_mb": 20.0, "cpu_waiting": cpu} for number, runner, cpu in (
        (10, 100.0, 0.0), (30, 110.0, 0.01), (10, 110.0, 0.0), (30, 123.0, 0.02), (10, 110.0, 0.0), (30, 180.0, 0.03))]
    found = episodes.of_open(rows)
    assert found["open_episodes_growth"].value == pytest.approx(200 / 143) and not found["open_episodes_growth"].reached
    assert found["open_episodes_growth"].more["kb_per_episode"] == 512
    assert found["open_episodes_cpu"].repeats == [0.01, 0.02, 0.03] and found["open_episodes_cpu"].reached


def test_growth_compares_the_most_with_a_tenth_of_them():
    rows = [{"open": number, "driver_ms_per_sample": driver, "runner_ms_per_turn": 0.3}
            for number, driver in ((100, 9.0), (1000, 0.1), (10_000, 0.2))]
    found = episodes.of_growth(rows)
    assert found["episodes_growth_driver"].value == 2 and not found["episodes_growth_driver"].reached
    assert found["episodes_growth_runner"].value == 1 and found["episodes_growth_runner"].reached
