"""The last thing that a run does: it ends well only when every sample is accounted for."""

import sqlite3
from contextlib import closing

import pytest

from rlhf_ray.errors import LedgerError
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.ledger import Ledger
from rlhf_ray.replay.ledger_tables import LedgerFacts
from rlhf_ray.stages.ppo import finalize_ledger
from tests.unit.replay.ledgers import begin

FACTS = LedgerFacts(samples_per_step=4, samples_per_prompt=2, max_staleness=0, source_rows=(4,), seed=0, shuffle=False,
                    weights=(1.0,))
UNDER_WAY = [SampleKey(0, 2, n) for n in range(2)]


@pytest.fixture
def ledger(tmp_path):
    """Of a run of one update on two prompts; a third one is under way."""
    made = Ledger.create(tmp_path / "ledger.sqlite", FACTS)
    first = [SampleKey(0, row, n) for row in (0, 1) for n in range(2)]
    begin(made, first)
    made.generated(first, "generator/0")
    made.scored(first, 0)
    made.consumed(first, 1)
    made.mark_committed()
    begin(made, UNDER_WAY, 1)
    return made


def test_what_was_under_way_is_told_apart_as_unused(ledger):
    told = finalize_ledger(ledger, UNDER_WAY)
    assert (told["committed"], told["leased"], told["unused"], told["attempts given up"]) == (4, 0, 2, 0)


@pytest.mark.parametrize("given_up", [False, True])
def test_what_is_open_and_the_run_does_not_know_of_was_lost(ledger, given_up):
    if given_up:
        ledger.give_up(UNDER_WAY, "its worker died")
    with pytest.raises(LedgerError, match=r"when a run has ended.*2 samples break it.*\(epoch 0, row 2, sample 0"):
        finalize_ledger(ledger, [])


@pytest.mark.parametrize("harm, said", [
    ("DELETE FROM samples WHERE row = 1 AND sample = 1", "each update consumed one batch: update 1 consumed 3 samples"),
    ("UPDATE samples SET state = 'consumed' WHERE row = 1", "an update is committed whole: 2 of 4 samples"),
    ("UPDATE samples SET version = -1 WHERE row = 0", "nothing older than 0 versions was trained on"),
    ("UPDATE samples SET row = 3 WHERE row = 1", "at 3 prompts, "),
])
def test_a_run_whose_books_are_wrong_ends_with_an_error(ledger, harm, said):
    with closing(sqlite3.connect(ledger.path)) as db:
        db.execute(harm)
        db.commit()
    with pytest.raises(LedgerError, match="the ledger audit failed") as caught:
        finalize_ledger(ledger, UNDER_WAY)
    assert said in str(caught.value) and caught.value.exit_code == 1
