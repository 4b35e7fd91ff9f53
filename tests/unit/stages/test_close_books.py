"""The last thing that a run does: it ends well only when every sample is accounted for."""

import sqlite3
from contextlib import closing

import pytest

from rlhf_ray.errors import LedgerError
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.ledger import Ledger
from rlhf_ray.replay.ledger_tables import LedgerFacts
from rlhf_ray.stages.ppo import close_books

FACTS = LedgerFacts(samples_per_step=4, samples_per_prompt=2, max_staleness=0, source_rows=(4,))


@pytest.fixture
def ledger(tmp_path):
    """Of a run of one update on two prompts; a third one is under way."""
    made = Ledger.create(tmp_path / "ledger.sqlite", FACTS)
    first, next_one = ([SampleKey(0, row, n) for row in rows for n in range(2)] for rows in ((0, 1), (2,)))
    made.lease(first, 0)
    made.generated(first, "generator/0")
    made.scored(first, 0)
    made.consumed(first, 1)
    made.commit()
    made.lease(next_one, 1)
    return made


def test_what_was_under_way_counts_as_never_begun(ledger):
    told = close_books(ledger)
    assert (told["committed"], told["leased"], told["attempts given up"]) == (4, 0, 2)


@pytest.mark.parametrize("harm, said", [
    ("DELETE FROM samples WHERE row = 1 AND sample = 1", "each update consumed one batch: update 1 consumed 3 samples"),
    ("UPDATE samples SET state = 'consumed' WHERE row = 1", "an update is committed whole: 2 of 4 samples"),
    ("UPDATE samples SET version = -1 WHERE row = 0", "nothing older than 0 versions was trained on"),
])
def test_a_run_whose_books_are_wrong_ends_with_an_error(ledger, harm, said):
    with closing(sqlite3.connect(ledger.path)) as db:
        db.execute(harm)
        db.commit()
    with pytest.raises(LedgerError, match="the ledger does not add up") as caught:
        close_books(ledger)
    assert said in str(caught.value) and caught.value.exit_code == 1
