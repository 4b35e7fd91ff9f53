"""A run that was stopped goes on with another max_staleness: nothing is lost, made twice for nothing, or too old.

Loop, pipeline, buffer, ledger and its audit are the real ones; workers are stand-ins with random delays, in virtual
time.
"""

import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.virtual_time import run_in_virtual_time
from rlhf_ray.errors import RunInterrupted
from rlhf_ray.replay.audit import audit, counts
from rlhf_ray.replay.ledger import Ledger, open_for_reading
from rlhf_ray.replay.ledger_tables import LedgerFacts
from tests.unit.coordinator.harnesses import DelayedRun

BATCH, STEPS = 8, 7


class Stretch(DelayedRun):
    """A run from a checkpoint, or from its beginning, that is stopped after a step; or that ends."""

    def __init__(self, config, summary, directory, seed, saved=None, stop_after=None, pace=(1.0, 1.0), capacity=None):
        self._path, self._stop_after, self._saved = Path(directory) / "ledger.sqlite", stop_after, saved
        self.snapshot = None
        super().__init__(config, summary, seed, generating=pace[0], updating=pace[1], capacity=capacity)
        self.coordinator.recovery.save = self.save

    def ledger_of(self, config):
        facts = LedgerFacts.of(config.coordinator, self.state.cursor)
        self.ledger = (Ledger.resume(self._path, self._copy, facts) if self._saved
                       else Ledger.create(self._path, facts))
        return self.ledger

    @property
    def _copy(self):
        return self._path.with_name("copy.sqlite")

    async def save(self):
        ready = self.buffer.ready()
        self.snapshot = (self.state.state_dict(self.buffer.under_way()), self.buffer.state_dict(),
                         {chunk.place.plain(): chunk.experience for chunk in ready},
                         {chunk.place.plain(): chunk.summary for chunk in ready})
        self._copy.unlink(missing_ok=True)
        self.ledger.save(self._copy)
        return 0.0

    async def publish(self, version):
        if version == self._stop_after:
            self.coordinator.stop.ask("SIGTERM")
        return await super().publish(version)

    async def _go_on(self):
        if self._saved:
            state, buffer, refs, summaries = self._saved
            self.state.load_state_dict(state, self.buffer.load_state_dict(buffer, refs, summaries))
            self.versions = [self.state.step] * len(self.versions)
            self.pipeline.resume()
        await self.coordinator.run()

    def go(self):
        first = self._saved[0]["step"] if self._saved else 0
        try:
            run_in_virtual_time(self._go_on())
        except RunInterrupted:
            assert self.state.step == self._stop_after
        finally:
            self.ledger.close()
        eta = self.config.coordinator.max_staleness
        for step, chunks in enumerate(self.trained, start=first):
            assert all(0 <= step - oldest <= eta for _, oldest in chunks), f"update {step} with max_staleness={eta}"
        return [key for chunks in self.trained for keys, _ in chunks for key in keys]


@pytest.fixture(scope="module")
def stretches(ppo_config, summary):
    def run(bounds, stops, seed, chunk=2, pace=(1.0, 1.0), capacity=None):
        """Keys trained on by all stretches together, and the ledger's path; `bounds` has each one's max_staleness."""
        directory, saved, trained = tempfile.TemporaryDirectory(), None, []
        for number, (eta, stop_after) in enumerate(zip(bounds, [*stops, None], strict=True)):
            config = ppo_config(prompts=BATCH, chunk=chunk, staleness=eta, steps=STEPS)
            stretch = Stretch(config, summary, directory.name, seed + number, saved, stop_after, pace, capacity)
            trained += stretch.go()
            saved = stretch.snapshot
        assert stretch.state.step == STEPS and stretch.buffer.under_way() == [] and stretch.state.returned == []
        with closing(Ledger(stretch.ledger.path)) as ledger:
            ledger.mark_committed()
        with closing(open_for_reading(stretch.ledger.path)) as db:
            problems, found = audit(db, ended=True), counts(db)
            reasons = {reason for reason, in db.execute("SELECT DISTINCT reason FROM attempts")}
        assert problems == [] and found["committed"] == BATCH * STEPS
        assert sorted(key.row for key in trained) == list(range(BATCH * STEPS)), "each once"
        directory.cleanup()
        return reasons

    return run


@settings(max_examples=8, deadline=None)
@given(bounds=st.lists(st.integers(0, 3), min_size=2, max_size=3), stop=st.integers(1, 4), seed=st.integers(0, 10**6),
       chunk=st.sampled_from([1, 2, 4]), pace=st.sampled_from([(0.2, 4.0), (1.0, 1.0), (3.0, 0.2)]))
def test_every_sample_is_trained_once_and_within_the_bound_of_its_time(stretches, bounds, stop, seed, chunk, pace):
    stretches(bounds, [stop, stop + 1][: len(bounds) - 1], seed, chunk, pace)


@pytest.mark.parametrize("bounds", [(2, 0), (2, 1), (3, 1), (0, 2)])
@pytest.mark.parametrize("capacity", [None, 4 * BATCH])
def test_what_waited_under_a_larger_bound_is_made_again_when_its_turn_comes(stretches, bounds, capacity):
    """Updates are slow, so that the whole lead waits when the run is stopped; with room in the buffer or without."""
    reasons = stretches(bounds, [3], seed=1, pace=(0.1, 50.0), capacity=capacity)
    dropped = {reason for reason in reasons if "when the run resumed at version 3" in reason}
    assert bool(dropped) is (bounds[1] < bounds[0])
    assert all(f"max_staleness={bounds[1]}" in reason for reason in dropped)


def test_a_run_that_is_stopped_again_before_all_is_admitted_anew_forgets_none(stretches):
    stretches((3, 0, 0, 1), [2, 3, 4], seed=5, pace=(0.1, 50.0))
