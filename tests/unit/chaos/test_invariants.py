"""The samples of a refused prompt must be quarantined in ledger and file, and no others."""

import json
from contextlib import closing

import pytest

from chaos.invariants import unexpected_quarantine
from chaos.outcomes import outcomes
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.ledger import Ledger
from tests.unit.replay.ledgers import FACTS, begin


@pytest.fixture
def refused(fake_run):
    """refused(*samples) -> a run that has quarantined these (row, prompt, reason), after "w7 w8" was refused."""
    held_out = fake_run.record.config.with_name("held_out.jsonl")
    held_out.write_text(json.dumps({"prompt": "w1 w2 w3"}) + "\n")
    fake_run.record.config.write_text(f"evaluation: {{prompts: {held_out}}}\n")
    fake_run.start(100, 200, 0, 0)
    number = fake_run.injected("http_400", 110, confirmed=False)
    fake_run.line("confirmed", 111, fault=number, prompt="w7 w8")
    fake_run.line("recovered", 112, fault=number)

    def leave(*samples, named=True):
        place = fake_run.record.directory
        with closing(Ledger.create(place / "ledger.sqlite", FACTS)) as ledger:
            for row, _, reason in samples:
                begin(ledger, [SampleKey(0, row, 0)])
                ledger.quarantine([SampleKey(0, row, 0)], reason)
        lines = [{"key": [0, row, 0], "prompt": prompt, "reason": reason} for row, prompt, reason in samples]
        (place / "quarantine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines if named))
        return fake_run.record

    return leave


def test_a_refused_prompt_is_quarantined(refused):
    record = refused((5, "w7 w8 w9", "it answers 400: no such sample"))
    (outcome,) = outcomes(record)
    assert outcome.survived and list(unexpected_quarantine(record)) == []


@pytest.mark.parametrize("samples, named", [
    ([(5, "w7 w88", "it answers 400")], True), ([(5, "w7 w8", "it answers 500")], True),
    ([(5, "w7 w8", "it answers 400")], False)])
def test_another_prompt_or_reason_or_a_missing_line_is_a_problem(refused, samples, named):
    record = refused(*samples, named=named)
    (outcome,) = outcomes(record)
    assert "prompt 'w7 w8' was not quarantined" in outcome.problem
    assert "rows [5]" in "".join(unexpected_quarantine(record))


def test_a_refused_prompt_that_was_trained_on_is_a_problem(refused):
    (outcome,) = outcomes(refused())
    assert not outcome.survived


def test_a_quarantined_prompt_that_was_not_refused_is_reported(refused):
    record = refused((5, "w7 w8", "it answers 400"), (6, "w1 w2", "it answers 400"))
    assert "rows [6] are quarantined" in "".join(unexpected_quarantine(record))


@pytest.mark.parametrize(("said", "problem"), [
    ("PPO: the held-out prompt of row 0 is left out of the evaluation: a response to it has no score: it ...", ""),
    ("PPO: done", "no held-out prompt was left out")])
def test_a_refused_held_out_prompt_is_left_out_of_its_evaluation(refused, fake_run, said, problem):
    refused()
    fake_run.record.faults.clear()
    fake_run.record.starts[0].log.write_text(said)
    number = fake_run.injected("http_400", 120, confirmed=False)
    fake_run.line("confirmed", 121, fault=number, prompt="w1 w2")
    fake_run.line("recovered", 122, fault=number)
    assert outcomes(fake_run.record)[-1].problem == problem
