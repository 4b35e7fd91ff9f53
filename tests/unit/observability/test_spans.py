"""Busy and waiting time, exact on intervals made by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_ray.observability.spans import Span, StepClock, timeline


def busy(clock, start, end, role):
    line = timeline(clock.work(start, end), start, end, [role])
    return line.seconds @ line.busy[role]


def test_busy_seconds_are_exact():
    clock = StepClock()
    clock.add("generator", 0.0, 6.0, worker=0)
    clock.add("generator", 2.0, 4.0, worker=1)
    clock.add("policy", 7.0, 9.5)
    assert [busy(clock, 0.0, 10.0, role) for role in ("generator", "policy", "critic")] == [8.0, 2.5, 0.0]


def test_a_timeline_says_when_nobody_was_busy():
    spans = [Span("generator", 0, 0.0, 4.0), Span("generator", 1, 3.0, 6.0), Span("policy", 0, 5.0, 9.0)]
    line = timeline(spans, 0.0, 10.0, ["generator", "policy"])
    assert line.seconds[line.busy["generator"] == 0].sum() == 4.0
    assert line.seconds[line.busy["policy"] == 0].sum() == 6.0


def test_overlapping_spans_of_one_worker_count_once():
    clock = StepClock()
    for start, end in ((0.0, 3.0), (1.0, 2.0), (2.5, 5.0)):
        clock.add("reward", start, end)
    assert busy(clock, 0.0, 10.0, "reward") == 5.0


def test_spans_are_cut_at_the_window_and_count_in_both_windows_they_reach_into():
    clock = StepClock()
    clock.add("generator", 8.0, 13.0)
    assert busy(clock, 0.0, 10.0, "generator") == 2.0
    assert busy(clock, 10.0, 20.0, "generator") == 3.0


def test_spans_of_the_past_are_forgotten():
    clock = StepClock()
    for i in range(100):
        clock.add("generator", i, i + 0.5)
    clock.work(99.0, 100.0)
    assert len(clock._spans) == 1


def test_a_call_that_returned_ends_now(monkeypatch):
    clock = StepClock()
    monkeypatch.setattr(clock, "now", lambda: 10.0)
    clock.add_returned("reference", 3.0)
    assert busy(clock, 0.0, 8.0, "reference") == 1.0


def test_refuses_a_span_that_ends_before_it_starts():
    with pytest.raises(ValueError, match=r"policy\[2\] ends at 1\.0.*start at 2\.0"):
        StepClock().add("policy", 2.0, 1.0, worker=2)


intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted), max_size=12)


@given(intervals, intervals, st.integers(0, 20), st.integers(1, 20))
def test_a_timeline_counts_busy_workers_as_one_would_unit_by_unit(first, second, start, length):
    spans = [Span("generator", worker, a, b) for worker, its in enumerate((first, second)) for a, b in its]
    line = timeline([*spans, Span("other", 0, 0, 50)], start, start + length, ["generator", "policy"])
    busy = sum(any(a <= unit < b for a, b in its) for its in (first, second) for unit in range(start, start + length))
    assert line.seconds.sum() == length and not line.busy["policy"].any()
    assert line.seconds @ line.busy["generator"] == busy
    assert line.busy["generator"].min() >= 0
