"""Busy and waiting time, exact on intervals made by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_ray.observability.spans import Span, StepClock, timeline


def test_busy_seconds_are_exact():
    clock = StepClock()
    clock.add("generator", 0.0, 6.0, worker=0)
    clock.add("generator", 2.0, 4.0, worker=1)
    clock.add("policy", 7.0, 9.5)
    s = clock.summary(0.0, 10.0, {"generator": 2, "policy": 1, "critic": 1})
    assert s["busy/generator"] == pytest.approx(8.0)
    assert s["busy/policy"] == pytest.approx(2.5)
    assert (s["busy/critic"], s["wait/critic"]) == (0.0, 10.0)


def test_waits_are_the_time_when_nobody_was_busy():
    clock = StepClock()
    clock.add("generator", 0.0, 4.0, worker=0)
    clock.add("generator", 3.0, 6.0, worker=1)
    clock.add("policy", 5.0, 9.0)
    s = clock.summary(0.0, 10.0, {"generator": 2, "policy": 1})
    assert s["wait/generator"] == pytest.approx(4.0)
    assert s["wait/policy"] == pytest.approx(6.0)
    assert s["wait/all"] == pytest.approx(1.0)


def test_overlapping_spans_of_one_worker_count_once():
    clock = StepClock()
    for start, end in ((0.0, 3.0), (1.0, 2.0), (2.5, 5.0)):
        clock.add("reward", start, end)
    assert clock.summary(0.0, 10.0, {"reward": 1})["busy/reward"] == pytest.approx(5.0)


def test_spans_are_cut_at_the_window_and_count_in_both_windows_they_reach_into():
    clock = StepClock()
    clock.add("generator", 8.0, 13.0)
    assert clock.summary(0.0, 10.0, {"generator": 1})["busy/generator"] == pytest.approx(2.0)
    assert clock.summary(10.0, 20.0, {"generator": 1})["busy/generator"] == pytest.approx(3.0)


def test_spans_of_the_past_are_forgotten():
    clock = StepClock()
    for i in range(100):
        clock.add("generator", i, i + 0.5)
    clock.summary(99.0, 100.0, {"generator": 1})
    assert len(clock._spans) == 1


def test_a_call_that_returned_ends_now(monkeypatch):
    clock = StepClock()
    monkeypatch.setattr(clock, "now", lambda: 10.0)
    clock.add_returned("reference", 3.0)
    assert clock.summary(0.0, 8.0, {"reference": 1})["busy/reference"] == pytest.approx(1.0)


def test_refuses_a_span_that_ends_before_it_starts_and_an_empty_window():
    clock = StepClock()
    with pytest.raises(ValueError, match=r"policy\[2\] ends at 1\.0.*start at 2\.0"):
        clock.add("policy", 2.0, 1.0, worker=2)
    with pytest.raises(ValueError, match="no time"):
        clock.summary(1.0, 1.0, {"policy": 1})


intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted), max_size=12)


@given(intervals, intervals, st.integers(0, 20), st.integers(1, 20))
def test_a_timeline_counts_busy_workers_as_one_would_unit_by_unit(first, second, start, length):
    spans = [Span("generator", worker, a, b) for worker, its in enumerate((first, second)) for a, b in its]
    line = timeline([*spans, Span("other", 0, 0, 50)], start, start + length, ["generator", "policy"])
    busy = sum(any(a <= unit < b for a, b in its) for its in (first, second) for unit in range(start, start + length))
    assert line.seconds.sum() == length and not line.busy["policy"].any()
    assert line.seconds @ line.busy["generator"] == busy
    assert line.busy["generator"].min() >= 0


@given(intervals, st.integers(0, 30), st.integers(1, 20))
def test_nobody_is_busy_for_longer_than_the_window(spans, start, length):
    clock = StepClock()
    for i, (a, b) in enumerate(spans):
        clock.add("generator", float(a), float(b), worker=i % 2)
    assert 0 <= clock.summary(float(start), float(start + length), {"generator": 2})["busy/generator"] <= 2 * length
