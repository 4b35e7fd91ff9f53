"""Of a prompt that the service refused the run must tell in ledger and file; of no other."""

import json
from contextlib import closing

import pytest

from chaos.outcome import outcomes
from chaos.refusals import others_left
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.ledger import Ledger
from tests.unit.replay.ledgers import begin
from tests.unit.replay.test_audit import FACTS


@pytest.fixture
def refused(made_up):
    """refused(*samples) -> a run that has quarantined these (row, prompt, reason), after "w7 w8" was refused."""
    made_up.start(100, 200, 0, 0)
    number = made_up.struck("http_400", 110, confirmed=False)
    made_up.line("confirmed", 111, fault=number, prompt="w7 w8")
    made_up.line("recovered", 112, fault=number)

    def leave(*samples, named=True):
        place = made_up.record.directory
        with closing(Ledger.create(place / "ledger.sqlite", FACTS)) as ledger:
            for row, _, reason in samples:
                begin(ledger, [SampleKey(0, row, 0)])
                ledger.quarantine([SampleKey(0, row, 0)], reason)
        lines = [{"key": [0, row, 0], "prompt": prompt, "reason": reason} for row, prompt, reason in samples]
        (place / "quarantine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines if named))
        return made_up.record

    return leave


def test_it_left_by_name(refused):
    record = refused((5, "w7 w8 w9", "it answers 400: no such sample"))
    (outcome,) = outcomes(record)
    assert outcome.survived and list(others_left(record)) == []


@pytest.mark.parametrize("samples, named", [
    ([(5, "w7 w88", "it answers 400")], True), ([(5, "w7 w8", "it answers 500")], True),
    ([(5, "w7 w8", "it answers 400")], False)])
def test_another_one_or_another_reason_or_no_name_will_not_do(refused, samples, named):
    record = refused(*samples, named=named)
    (outcome,) = outcomes(record)
    assert "no prompt 'w7 w8' left the run by name" in outcome.problem
    assert "rows [5]" in "".join(others_left(record))


def test_one_that_was_trained_on_did_not_leave(refused):
    (outcome,) = outcomes(refused())
    assert not outcome.survived


def test_a_prompt_that_left_besides_is_told_of(refused):
    record = refused((5, "w7 w8", "it answers 400"), (6, "w1 w2", "it answers 400"))
    assert "rows [6] are quarantined" in "".join(others_left(record))
