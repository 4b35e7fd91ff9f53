"""The phases of a start, and the sentence about them."""

from rlhf_ray.observability import start_phases
from rlhf_ray.observability.start_phases import StartPhases


def test_each_phase_is_announced_and_lasts_until_the_next(monkeypatch):
    now = iter([10.0, 12.5, 13.0])
    monkeypatch.setattr(start_phases.time, "monotonic", lambda: next(now))
    said = []
    start = StartPhases()
    start.begin("libraries", "loading libraries", said.append)
    start.begin("Ray", "starting Ray", said.append)
    assert said == ["loading libraries", "starting Ray"]
    assert start.ready() == "ready after 3.0 s: libraries 2.5, Ray 0.5"


def test_a_start_that_failed_is_no_part_of_the_next_one(monkeypatch):
    now = iter([0.0, 100.0, 101.0])
    monkeypatch.setattr(start_phases.time, "monotonic", lambda: next(now))
    start = StartPhases()
    start.begin("checks", "checking", lambda _: None)
    start.restart()
    start.begin("Ray", "starting Ray", lambda _: None)
    assert start.ready() == "ready after 1.0 s: Ray 1.0"
