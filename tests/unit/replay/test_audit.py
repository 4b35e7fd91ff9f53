"""The audit finds each way in which a ledger may not add up, and finds nothing wrong in what runs do."""

import sqlite3
from contextlib import closing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.audit import audit
from rlhf_ray.replay.ledger import Ledger, open_for_reading
from rlhf_ray.replay.ledger_tables import LedgerFacts

FACTS = LedgerFacts(samples_per_step=4, samples_per_prompt=2, max_staleness=1, source_rows=(3,))


def finished(path, steps=3):
    """The ledger of a run that came to its end."""
    ledger, cursor = Ledger.create(path, FACTS), PromptCursor(3, 0, shuffle=True)
    for step in range(1, steps + 1):
        chunk = [SampleKey(epoch, row, sample) for epoch, row in cursor.next(2) for sample in range(2)]
        ledger.lease(chunk, step - 1)
        ledger.generated(chunk, "generator/0")
        ledger.scored(chunk, step - 1)
        ledger.consumed(chunk, step)
    ledger.commit()
    ledger.close()
    return path


def problems(path, ended=True):
    with closing(open_for_reading(path)) as db:
        return audit(db, ended)


BROKEN = {
    "UPDATE samples SET state = 'lost' WHERE step = 1": "every sample is in a state",
    "UPDATE samples SET step = NULL WHERE step = 3": "exactly if an update was made with it",
    "UPDATE samples SET state = 'not_applied' WHERE step = 3": "not trained on by its update, has a reason",
    "UPDATE samples SET state = 'not_applied', reason = 'nan' WHERE step = 3 AND sample = 0": "is applied or not",
    "UPDATE samples SET state = 'quarantined', step = NULL WHERE step = 3": "has a reason",
    "UPDATE samples SET step = 7 WHERE step = 2": "without a gap",
    "UPDATE samples SET step = 2 WHERE step = 1 AND sample = 0": "each update consumed one batch",
    "UPDATE samples SET state = 'consumed' WHERE step = 2 AND sample = 0": "committed whole",
    "UPDATE samples SET state = 'consumed' WHERE step = 1": "committed in order",
    "UPDATE samples SET version = 0 WHERE step = 3": "nothing older than 1 versions",
    "UPDATE samples SET version = 3 WHERE step = 3": "nothing older than 1 versions",
    "DELETE FROM samples WHERE step = 2 AND sample = 1": "has its 2 samples",
    "UPDATE samples SET epoch = 5 WHERE epoch = 1": "visits every row before the next",
    "UPDATE samples SET row = 9 WHERE epoch = 1 AND row = 0": "one of the data set's",
    "UPDATE samples SET attempt = 3 WHERE step = 2": "numbered through",
    "UPDATE samples SET state = 'scored', step = NULL WHERE step = 3": "when a run has ended",
}


@pytest.mark.parametrize("change", BROKEN)
def test_each_invariant_is_found_broken_and_names_samples(tmp_path, change):
    path = finished(tmp_path / "ledger.sqlite")
    assert problems(path) == []
    with closing(sqlite3.connect(path)) as db, db:
        assert db.execute(change).rowcount > 0
    assert BROKEN[change] in " ".join(problem.invariant for problem in problems(path))


def test_a_run_under_way_may_have_samples_under_way(tmp_path):
    path = finished(tmp_path / "ledger.sqlite")
    ledger = Ledger(path)
    ledger.lease([SampleKey(2, 0, 0), SampleKey(2, 0, 1)], 3)
    assert problems(path, ended=False) == []
    assert [problem.invariant for problem in problems(path)] == ["when a run has ended, every sample is committed, "
                                                                "not_applied or quarantined"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["train", "save", "die", "redo"]), max_size=12), st.integers(0, 3))
def test_whatever_happens_to_a_run_its_ledger_adds_up(tmp_path_factory, events, seed):
    """Updates, checkpoints, deaths and attempts that are given up, in any order."""
    place = tmp_path_factory.mktemp("run")
    ledger, cursor, step = Ledger.create(place / "ledger.sqlite", FACTS), PromptCursor(3, seed, shuffle=True), 0
    saved = (0, cursor.state_dict())
    ledger.save(place / "copy_0.sqlite")
    for number, event in enumerate(events):
        chunk = []
        if event in ("train", "redo"):
            chunk = [SampleKey(epoch, row, sample) for epoch, row in cursor.next(2) for sample in range(2)]
            ledger.lease(chunk, step)
            ledger.generated(chunk, f"generator/{number % 2}")
        if event == "redo":
            ledger.give_up(chunk, "stale")
            ledger.lease(chunk, step)
            ledger.generated(chunk, "generator/1")
        if chunk:
            ledger.scored(chunk, step)
            step += 1
            ledger.consumed(chunk, step)
        if event == "save":
            ledger.save(place / f"copy_{number + 1}.sqlite")
            ledger.commit()
            saved = (number + 1, cursor.state_dict())
            kept = step
        if event == "die":
            step = kept if saved[0] else 0
            ledger = Ledger.resume(ledger.path, place / f"copy_{saved[0]}.sqlite", FACTS)
            cursor = PromptCursor(3, seed, shuffle=True)
            cursor.load_state_dict(saved[1])
        assert problems(ledger.path, ended=False) == []
    with closing(open_for_reading(ledger.path)) as db:
        assert db.execute("SELECT count(*) FROM samples").fetchone()[0] == 4 * step


def test_an_update_that_changed_nothing_counts_among_the_updates_and_is_never_committed(tmp_path):
    path = finished(tmp_path / "ledger.sqlite")
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE samples SET state = 'not_applied', reason = 'no number' WHERE step = 2")
    assert problems(path) == []
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE samples SET state = 'consumed' WHERE step = 1")
    assert any(p.invariant == "updates are committed in order" and "update 1 is not" in p.found for p in problems(path))
