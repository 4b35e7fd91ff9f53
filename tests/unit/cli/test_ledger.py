"""`rlhf-ray ledger`: counts, the story of a prompt, and the audit's exit code."""

import json
import sqlite3
from contextlib import closing

import pytest

from rlhf_ray.records import SampleKey
from rlhf_ray.replay.ledger import Ledger
from rlhf_ray.replay.ledger_tables import LedgerFacts
from tests.unit.replay.ledgers import begin


@pytest.fixture
def run(tmp_path):
    """A finished run of one update of two samples, the second of them made twice."""
    ledger = Ledger.create(tmp_path / "ledger.sqlite", LedgerFacts(2, 1, 0, (2,), 0, False, (1.0,)))
    keys = [SampleKey(0, 1, 0), SampleKey(0, 0, 0)]
    begin(ledger, keys)
    ledger.generated(keys, "generator/0")
    ledger.give_up(keys[1:], "generator/0 died")
    ledger.lease(keys[1:], 0)
    ledger.generated(keys[1:], "generator/1")
    ledger.scored(keys, 0)
    ledger.consumed(keys, 1)
    ledger.commit()
    ledger.close()
    (tmp_path / "summary.json").write_text(json.dumps({"stage": "ppo"}))
    return tmp_path


def test_it_counts_samples_by_what_became_of_them(command_line, run):
    told = command_line("ledger", str(run), "--check")
    assert told.code == 0
    numbers = {line.rsplit(maxsplit=1)[0]: int(line.rsplit(maxsplit=1)[1]) for line in told.out.splitlines()[:-1]}
    assert numbers == {"admitted": 0, "leased": 0, "generated": 0, "scored": 0, "consumed": 0, "committed": 2,
                       "not_applied": 0, "quarantined": 0, "unused": 0, "attempts given up": 1}
    assert told.out.splitlines()[-1] == "the audit found nothing wrong"


def test_it_tells_the_story_of_a_prompt(command_line, run):
    assert command_line("ledger", str(run), "--prompt", "0").out.splitlines() == [
        "epoch 0, sample 0: attempt 1 came as far as generated and was given up, drawn by generator/0: "
        "generator/0 died",
        "epoch 0, sample 0: attempt 2 is committed, drawn by generator/1, version 0, update 1",
    ]
    assert "has not come to row 7" in command_line("ledger", str(run), "--prompt", "7").out


def test_an_audit_that_finds_something_lists_it_and_exits_with_1(command_line, run):
    with closing(sqlite3.connect(run / "ledger.sqlite")) as db, db:
        db.execute("DELETE FROM samples WHERE row = 1")
    told = command_line("ledger", str(run), "--check")
    assert told.code == 1 and "the ledger audit failed" in told.err
    assert "update 1 consumed 1 samples, a batch has 2" in told.err


def test_a_directory_without_a_ledger_is_told_so(command_line, tmp_path):
    told = command_line("ledger", str(tmp_path))
    assert told.code == 1 and "no such ledger" in told.err and "A PPO run writes one" in told.err
    assert command_line("ledger", str(tmp_path / "none")).code == 2
