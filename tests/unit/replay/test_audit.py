"""The audit finds each way in which a ledger may not add up, and finds nothing wrong in what runs do."""

import sqlite3
from contextlib import closing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.errors import LedgerError
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.audit import audit, counts
from rlhf_ray.replay.ledger import Ledger, open_for_reading
from rlhf_ray.replay.ledger_tables import BLOCK_SAMPLES, LedgerFacts
from rlhf_ray.replay.prompt_order import PromptPlaces, sources
from tests.unit.replay.ledgers import FACTS, begin
from tests.unit.replay.simulated_run import SimulatedRun


def finished(path, steps=3):
    """The ledger of a run that came to its end."""
    ledger, cursor = Ledger.create(path, FACTS), PromptCursor(3, 0, shuffle=True)
    for step in range(1, steps + 1):
        chunk = [SampleKey(epoch, row, sample) for epoch, row in cursor.next(2) for sample in range(2)]
        begin(ledger, chunk, step - 1)
        ledger.generated(chunk, "generator/0")
        ledger.scored(chunk, step - 1)
        ledger.consumed(chunk, step)
    ledger.mark_committed()
    ledger.close()
    return path


def problems(path, ended=True):
    with closing(open_for_reading(path)) as db:
        return audit(db, ended)


def change(path, *statements):
    with closing(sqlite3.connect(path)) as db, db:
        for statement in statements:
            assert db.execute(statement).rowcount > 0


BROKEN = {
    "UPDATE samples SET state = 'lost' WHERE step = 1": "every sample is in a known state",
    "UPDATE samples SET step = NULL WHERE step = 3": "exactly if an update was made with it",
    "UPDATE samples SET state = 'not_applied' WHERE step = 3": "not trained on by its update has a reason",
    "UPDATE samples SET state = 'not_applied', reason = 'nan' WHERE step = 3 AND sample = 0": "is applied or not",
    "UPDATE samples SET state = 'quarantined', step = NULL WHERE step = 3": "has a reason",
    "UPDATE samples SET state = 'unused', step = NULL WHERE step = 3": "has a reason",
    "UPDATE samples SET step = 7 WHERE step = 2": "without a gap",
    "UPDATE samples SET step = 2 WHERE step = 1 AND sample = 0": "each update consumed one batch",
    "UPDATE samples SET step = 3 - step WHERE step < 3 AND sample = 0": "all samples of a prompt",
    "UPDATE samples SET state = 'consumed' WHERE step = 2 AND sample = 0": "committed whole",
    "UPDATE samples SET state = 'consumed' WHERE step = 1": "committed in order",
    "UPDATE samples SET version = 0 WHERE step = 3": "nothing older than 1 versions",
    "UPDATE samples SET version = 3 WHERE step = 3": "nothing older than 1 versions",
    "DELETE FROM samples WHERE step = 2 AND sample = 1": "has its 2 samples",
    "DELETE FROM samples WHERE epoch = 0 AND row = 1": "that the data cursor handed out is in the ledger",
    "UPDATE samples SET epoch = 5 WHERE epoch = 1": "in the ledger was handed out",
    "UPDATE samples SET row = 9 WHERE epoch = 1 AND row = 0": "one of the data set's",
    "UPDATE samples SET state = 'filtered', step = NULL, reason = 'equal' WHERE step = 3":
        "in a run with dynamic sampling alone",
    "UPDATE samples SET state = 'filtered', step = NULL, reason = 'equal' WHERE step = 3 AND sample = 1":
        "all samples of a prompt are filtered, or none",
    "UPDATE samples SET attempt = 3 WHERE step = 2": "numbered consecutively",
    "UPDATE samples SET state = 'scored', step = NULL WHERE step = 3": "when a run has ended",
    "UPDATE samples SET state = 'scored', step = NULL": "at most 8 samples are open or unused, which is 2 batches",
    "UPDATE cursor SET handed_out = 5": "in the ledger was handed out",
    "UPDATE cursor SET handed_out = 7": "that the data cursor handed out is in the ledger",
}


@pytest.mark.parametrize("harm", BROKEN)
def test_each_invariant_is_found_broken_and_names_samples(tmp_path, harm):
    path = finished(tmp_path / "ledger.sqlite")
    assert problems(path) == []
    change(path, harm)
    assert BROKEN[harm] in " ".join(problem.invariant for problem in problems(path))


def test_a_prompt_that_several_updates_consumed_is_named(tmp_path):
    path = finished(tmp_path / "ledger.sqlite")
    change(path, "UPDATE samples SET step = 2 WHERE epoch = 0 AND row = 0 AND sample = 0",
           "UPDATE samples SET step = 1 WHERE epoch = 0 AND row = 0 AND sample = 1")
    assert "several did of row 0 in epoch 0 (updates 1 to 2)" in [problem.violation for problem in problems(path)]


def test_a_run_under_way_may_have_samples_under_way(tmp_path):
    path = finished(tmp_path / "ledger.sqlite")
    ledger, cursor = Ledger(path), PromptCursor(3, 0, shuffle=True)
    (epoch, row), = cursor.next(7)[6:]
    begin(ledger, [SampleKey(epoch, row, 0), SampleKey(epoch, row, 1)], 3)
    assert problems(path, ended=False) == []
    assert [problem.invariant for problem in problems(path)] == [
        "when a run has ended, every sample is committed, not_applied, quarantined, filtered or unused"]


def test_a_prompt_dropped_for_ever_is_missed_although_another_epochs_is_trained_on_in_its_place(tmp_path):
    """With attempts that were given up the dropped prompt was tried, and every update has its whole batch."""
    ledger, cursor = Ledger.create(tmp_path / "ledger.sqlite", FACTS), PromptCursor(3, 0, shuffle=True)
    drawn = [[SampleKey(epoch, row, sample) for sample in range(2)] for epoch, row in cursor.next(7)]
    for step, prompts in ((1, [drawn[0], drawn[1]]), (2, [drawn[3], drawn[4]]), (3, [drawn[5], drawn[6]])):
        if step == 2:
            begin(ledger, drawn[2], 1)
            ledger.give_up(drawn[2], "its worker died")  # and nobody tries again
        for keys in prompts:
            begin(ledger, keys, step - 1)
            ledger.generated(keys, "generator/0")
            ledger.scored(keys, step - 1)
            ledger.consumed(keys, step)
    ledger.mark_committed()
    named = f"(epoch {drawn[2][0].epoch}, row {drawn[2][0].row}, sample 0, admitted)"
    assert [named in problem.violation for problem in problems(ledger.path)] == [True]
    change(ledger.path, "DELETE FROM samples WHERE state = 'admitted'")  # as if it had never been admitted
    named = f"source 0, at 7 prompts, lacks row {drawn[2][0].row} of epoch {drawn[2][0].epoch}"
    for ended in (True, False):
        assert [problem.violation for problem in problems(ledger.path, ended)] == [named]


FACTS_OF_A_RUN = st.builds(
    lambda staleness, per_prompt, prompts, data, seed, shuffle, block: LedgerFacts(
        prompts * per_prompt, per_prompt, staleness, data[0], seed, shuffle, data[1], True, block),
    st.integers(0, 2), st.integers(1, 2), st.integers(1, 3),
    st.sampled_from([((3,), (1.0,)), ((8,), (1.0,)), ((4, 3), (1.0, 1.0)), ((2, 7, 3), (0.2, 0.7, 0.1))]),
    st.integers(0, 5), st.booleans(), st.sampled_from([1, 5, BLOCK_SAMPLES]))
MANY = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
EVENTS = st.lists(st.sampled_from(["train", "train", "move", "save", "die"]), max_size=14)


def live(run, events):
    for event in events:
        {"train": run.train, "move": lambda: (run.admit(), run.move()), "save": run.save, "die": run.die}[event]()
        yield


@MANY
@given(FACTS_OF_A_RUN, EVENTS, st.integers(0, 99), st.sampled_from([0.0, 0.3]))
def test_whatever_happens_to_a_run_its_ledger_adds_up(tmp_path_factory, facts, events, seed, quarantines):
    """Updates, checkpoints, deaths, prompts set aside and attempts that are given up, in any order; at its end too."""
    run = SimulatedRun(tmp_path_factory.mktemp("run"), facts, seed, quarantines)
    for _ in live(run, events):
        assert problems(run.path, ended=False) == []
    assert problems(run.end()) == []
    with closing(open_for_reading(run.path)) as db:
        trained = counts(db)["committed"]
    assert trained == facts.samples_per_step * run.step


def prompts_of(path, condition):
    with closing(open_for_reading(path)) as db:
        return db.execute(f"SELECT DISTINCT epoch, row FROM samples WHERE {condition} ORDER BY 1, 2").fetchall()


def never_handed_out(run):
    """A prompt of an epoch that has not begun."""
    with closing(open_for_reading(run.path)) as db:
        return 1 + db.execute("SELECT max(epoch) FROM samples").fetchone()[0], 0


def where(prompt):
    return f"epoch = {prompt[0]} AND row = {prompt[1]}"


def drop_and_take_another(run, one):
    epoch, row = never_handed_out(run)
    return f"UPDATE samples SET epoch = {epoch}, row = {row} WHERE {where(one)}", [one, (epoch, row)]


def forget(run, one):
    return f"DELETE FROM samples WHERE {where(one)}", [one]


def duplicate(run, one):
    per_prompt = run.facts.samples_per_prompt
    return (f"INSERT INTO samples SELECT epoch, row, {per_prompt}, attempt, state, version, worker, step, reason FROM "
            f"samples WHERE {where(one)} AND sample = 0"), [one]


def make_up(run, one):
    epoch, row = never_handed_out(run)
    return (f"INSERT INTO samples SELECT {epoch}, {row}, sample, attempt, state, version, worker, step, reason FROM "
            f"samples WHERE {where(one)}"), [(epoch, row)]


def leave_open(run, one):
    return f"UPDATE samples SET state = 'scored', step = NULL WHERE {where(one)}", [one]


@MANY
@given(FACTS_OF_A_RUN, st.integers(2, 5), st.integers(0, 99), st.booleans(),
       st.sampled_from([drop_and_take_another, forget, duplicate, make_up, leave_open]), st.randoms())
def test_one_prompt_that_is_not_accounted_for_is_named(tmp_path_factory, facts, steps, seed, ended, harm, chosen):
    run = SimulatedRun(tmp_path_factory.mktemp("run"), facts, seed)
    for _ in live(run, ["train"] * steps):
        pass
    if ended:
        run.end()
    if harm is leave_open and not ended:
        return  # a run under way may have it so
    statement, named = harm(run, chosen.choice(prompts_of(run.path, "step IS NOT NULL")))
    change(run.path, statement)
    told = " ".join(problem.violation for problem in problems(run.path, ended))
    for epoch, row in named:
        assert any(name in told for name in (f"row {row} of epoch {epoch}", f"row {row} in epoch {epoch}",
                                             f"(epoch {epoch}, row {row}, ")), told


@pytest.mark.parametrize("facts", [LedgerFacts(2, 1, 0, (5,), 3, True, (1.0,)),
                                   LedgerFacts(2, 1, 0, (3, 3), 3, True, (2.0, 1.0))])
def test_without_staleness_prompts_that_change_places_are_named(tmp_path, facts):
    run = SimulatedRun(tmp_path, facts)
    for _ in live(run, ["train"] * 4):
        pass
    run.end()
    first = [prompts_of(run.path, f"step = {step} AND row < {facts.source_rows[0]}")[0] for step in (1, 3)]
    change(run.path, f"UPDATE samples SET step = 9 WHERE {where(first[0])}",
           f"UPDATE samples SET step = 1, version = 0 WHERE {where(first[1])}",
           "UPDATE samples SET step = 3, version = 2 WHERE step = 9")
    (problem,) = problems(run.path)
    assert problem.invariant == "without staleness, prompts are trained on in the order in which they are handed out"
    assert f"row {first[0][1]} of epoch {first[0][0]}" in problem.violation


def test_without_staleness_the_last_row_of_a_source_has_its_place_too(tmp_path):
    run = SimulatedRun(tmp_path, LedgerFacts(2, 1, 0, (3,), 0, False, (1.0,)))
    for _ in live(run, ["train"] * 3):  # rows 0 and 1, 2 and 0, 1 and 2
        pass
    run.end()
    change(run.path, "UPDATE samples SET step = 9 WHERE epoch = 0 AND row = 2",
           "UPDATE samples SET step = 2, version = 1 WHERE epoch = 1 AND row = 2",
           "UPDATE samples SET step = 3, version = 2 WHERE step = 9")
    (told,) = [p.violation for p in problems(run.path) if "in the order" in p.invariant]
    assert told == ("update 2 consumed row 0 of epoch 1, and row 2 of epoch 0, which comes before it, was left for "
                    "update 3")


def test_without_staleness_a_prompt_that_waits_while_later_ones_are_trained_on_is_named(tmp_path):
    run = SimulatedRun(tmp_path, LedgerFacts(2, 1, 0, (50,), 3, True, (1.0,)))
    for _ in live(run, ["train"] * 2):
        pass
    epoch, row = prompts_of(run.path, "step = 1")[0]
    change(run.path, f"UPDATE samples SET state = 'admitted', step = NULL WHERE {where((epoch, row))}")
    told = [p.violation for p in problems(run.path, ended=False) if "in the order" in p.invariant]
    assert len(told) == 1 and f"row {row} of epoch 0, which comes before it, is not trained on" in told[0]


def test_what_the_run_did_not_know_of_at_its_end_is_lost_and_not_unused(tmp_path):
    run = SimulatedRun(tmp_path, FACTS)
    for _ in live(run, ["train"] * 3):
        pass
    keys, *_ = run.chunks.pop(max(run.chunks))
    (problem,) = problems(run.end())
    assert "when a run has ended" in problem.invariant
    assert f"(epoch {keys[0].epoch}, row {keys[0].row}, sample 0" in problem.violation


def test_sources_that_are_not_mixed_by_their_weights_are_named(tmp_path):
    facts = LedgerFacts(2, 1, 0, (9, 9), 0, False, (1.0, 1.0))
    ledger = Ledger.create(tmp_path / "ledger.sqlite", facts)
    keys = [SampleKey(0, row, 0) for row in (0, 1)]
    ledger.admit(keys, [2, 0])
    (problem,) = problems(ledger.path, ended=False)
    assert problem.invariant == "sources are handed out in proportion to their weights"
    assert problem.violation == "2 of 2 prompts are of source 0, whose weight is 1 of 2"


@MANY
@given(FACTS_OF_A_RUN, st.integers(0, 60))
def test_what_the_cursor_hands_out_is_what_the_audit_enumerates(facts, drawn):
    cursor = PromptCursor(facts.source_rows, facts.seed, facts.shuffle, facts.weights)
    out = cursor.next(drawn)
    listed = [(epoch, int(row)) for source in sources(facts, cursor.position)
              for epoch in range(source.under_way + 1) for row in source.of(epoch)]
    assert sorted(out) == sorted(listed) and len(listed) == drawn
    assert all(source.count(epoch) == len(source.of(epoch)) for source in sources(facts, cursor.position)
               for epoch in range(-1, source.under_way + 2))


def test_counting_in_a_damaged_ledger_is_an_error_that_names_its_file(tmp_path):
    path = finished(tmp_path / "ledger.sqlite")
    with closing(open_for_reading(path)) as db, closing(sqlite3.connect(path)) as other:
        other.execute("DROP TABLE attempts")
        with pytest.raises(LedgerError, match="ledger.sqlite cannot be read: no such table"):
            counts(db)


def test_a_row_that_the_data_do_not_have_has_no_place():
    places = PromptPlaces(LedgerFacts(2, 1, 0, (3, 2), 0, False, (1.0, 1.0)))
    assert places.of(0, 4) == (1, 1)
    with pytest.raises(IndexError, match="row 5 of 5"):
        places.of(0, 5)


def test_the_audit_sees_one_moment_of_a_run_that_goes_on(tmp_path):
    run = SimulatedRun(tmp_path, FACTS)
    run.train()
    with closing(open_for_reading(run.path)) as db:
        assert audit(db, ended=False) == [] and not db.in_transaction
        run.train()
        assert audit(db, ended=False) == []


def test_an_update_that_changed_nothing_counts_among_the_updates_and_is_never_committed(tmp_path):
    path = finished(tmp_path / "ledger.sqlite")
    change(path, "UPDATE samples SET state = 'not_applied', reason = 'no number' WHERE step = 2")
    assert problems(path) == []
    change(path, "UPDATE samples SET state = 'consumed' WHERE step = 1")
    assert any(p.invariant == "updates are committed in order" and "update 1 is "
                                                                   "not" in p.violation for p in problems(path))
