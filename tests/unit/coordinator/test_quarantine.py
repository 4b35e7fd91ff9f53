"""Prompts without a score leave the run by name and within a budget, and others take their places."""

import asyncio
import json
from collections import Counter
from contextlib import closing

import pytest

from rlhf_ray.coordinator.quarantine import Quarantine
from rlhf_ray.errors import RewardError, UnscoredSamples
from rlhf_ray.records import SampleKey, Unscored
from rlhf_ray.replay.audit import audit, counts
from rlhf_ray.replay.ledger import Ledger, open_for_reading
from rlhf_ray.replay.ledger_tables import LedgerFacts
from tests.unit.coordinator.harnesses import FIRST, QuarantineHarness
from tests.unit.replay.ledgers import begin


def play(harness, steps):
    """Keys trained on, step by step; then the ledger's counts and what its audit finds."""
    async def run():
        trained = [await harness.train() for _ in range(steps)]
        await harness.pipeline.close()
        return trained

    trained = asyncio.run(asyncio.wait_for(run(), 20))
    with closing(open_for_reading(harness.ledger.path)) as db:
        return trained, counts(db), audit(db, ended=False)


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_prompt_leaves_with_all_its_samples_and_the_next_one_takes_its_place(ppo_config, summary, staleness):
    config = ppo_config(prompts=8, chunk=4, staleness=staleness, steps=3)
    config = config.model_copy(update={"coordinator": config.coordinator.model_copy(update={"samples_per_prompt": 2})})
    harness = QuarantineHarness(config, summary, bad=[FIRST[2], FIRST[9]])
    trained, found, wrong = play(harness, 3)
    keys = [key for step in trained for key in step]
    assert wrong == [] and found["consumed"] == 48 and found["quarantined"] == 4
    assert len(set(keys)) == 48 and not {key.row for key in keys} & harness.bad
    assert {key.row for key in keys} == set(FIRST[:26]) - harness.bad
    assert harness.pipeline.quarantine.samples == 4
    lines = [json.loads(line) for line in harness.file.read_text().splitlines()]
    assert sorted((line["key"], line["prompt"], line["reason"]) for line in lines) == sorted(
        ([0, row, 0], f"p{row}", f"bad {row}") for row in harness.bad)
    known = harness.ledger.quarantined()
    assert known.reasons == {row: f"bad {row}" for row in harness.bad}
    assert known.keys == {SampleKey(0, row, sample) for row in harness.bad for sample in range(2)}
    assert [f"({n} of at most 5 prompts" in told for n, told in enumerate(harness.warnings, start=1)] == [True] * 2


def given_up(harness):
    """The attempts at samples that were given up, by the ledger."""
    with closing(open_for_reading(harness.ledger.path)) as db:
        return db.execute("SELECT row, reason FROM attempts").fetchall()


def test_the_other_samples_of_the_chunk_are_not_generated_again(ppo_config, summary):
    harness = QuarantineHarness(ppo_config(prompts=4, chunk=4, steps=1), summary, bad=[FIRST[1]])
    (keys,), found, wrong = play(harness, 1)
    assert [key.row for key in keys] == [FIRST[0], FIRST[2], FIRST[3], FIRST[4]]
    generated = [[key.row for key in chunk] for chunk, _ in harness.seeds]
    assert generated == [FIRST[:4], FIRST[4:5]]
    assert harness.batches["values"] == [[[SampleKey(0, FIRST[row], 0) for row in rows]] for rows in ((0, 2, 3), (4,))]
    assert wrong == [] and found["consumed"] == 4 and found["quarantined"] == 1


@pytest.mark.parametrize("staleness", [0, 2])
def test_no_sample_is_generated_twice_when_others_of_its_chunk_or_scoring_batch_leave(
        ppo_config, summary, staleness, monkeypatch):
    monkeypatch.setattr("rlhf_ray.coordinator.pipeline.LINGER", 10.0)  # chunks are scored together if they may be
    config = ppo_config(prompts=8, chunk=4, staleness=staleness, steps=3)
    harness = QuarantineHarness(config, summary, bad=[FIRST[place] for place in (1, 2, 9, 13)], limit=0.5)
    trained, found, wrong = play(harness, 3)
    assert wrong == [] and found["consumed"] == 24
    generated = Counter(key for chunk, _ in harness.seeds for key in chunk)
    assert given_up(harness) == [] and set(generated.values()) == {1}
    assert {key.row for step in trained for key in step} & harness.bad == set()


def test_too_many_end_the_run_and_the_first_reasons_are_told(ppo_config, summary):
    harness = QuarantineHarness(ppo_config(prompts=8, chunk=2, steps=3), summary, bad=FIRST[:4], limit=0.05)
    said = r"(?s)[34] of 50 prompts have .*quarantine_limit=0\.05 lets 2 .*- row \d+: bad"
    with pytest.raises(RewardError, match=said):
        play(harness, 1)
    assert len(harness.ledger.quarantined().reasons) == 2


def test_without_a_quarantine_the_error_ends_the_run(ppo_config, summary):
    harness = QuarantineHarness(ppo_config(), summary, bad=FIRST[:1])
    harness.pipeline.quarantine = None
    with pytest.raises(UnscoredSamples, match="no score"):
        play(harness, 1)


def test_a_resumed_run_knows_who_left_and_forgets_who_left_after_its_checkpoint(tmp_path):
    def unscored(*rows):
        return UnscoredSamples("no score", [Unscored(SampleKey(0, row, 0), "p", "r", f"bad {row}") for row in rows])

    facts = LedgerFacts(2, 1, 0, (20,), seed=0, shuffle=False, weights=(1.0,))
    ledger, file = Ledger.create(tmp_path / "ledger.sqlite", facts), tmp_path / "quarantine.jsonl"
    keys, told = [SampleKey(0, row, 0) for row in range(4)], []
    quarantine = Quarantine(ledger, file, 0.1, 20, told.append)
    begin(ledger, keys)
    assert quarantine.set_aside(keys[:2], unscored(1)) == keys[:1]
    ledger.save(tmp_path / "copy.sqlite")
    assert quarantine.set_aside(keys[2:], unscored(2, 9)) == keys[3:], "another chunk's samples are not its own"
    assert len(file.read_text().splitlines()) == 2
    with file.open("a") as torn:
        torn.write('{"key": [0, 3')
    ledger.close()
    resumed = Ledger.resume(tmp_path / "ledger.sqlite", tmp_path / "copy.sqlite", facts)
    again = Quarantine(resumed, file, 0.1, 20, told.append)
    assert again.samples == 1 and [json.loads(line)["key"] for line in file.read_text().splitlines()] == [[0, 1, 0]]
    resumed.start_attempt(keys[2:], 0)
    again.set_aside(keys[2:], unscored(2))
    with pytest.raises(RewardError, match="3 of 20 prompts"):
        again.set_aside(keys[3:], unscored(3))


def test_prompts_of_a_chunk_that_leave_together_are_one_line(tmp_path):
    facts = LedgerFacts(2, 1, 0, (20,), seed=0, shuffle=False, weights=(1.0,))
    ledger, told = Ledger.create(tmp_path / "ledger.sqlite", facts), []
    keys = [SampleKey(0, row, 0) for row in range(9)]
    quarantine = Quarantine(ledger, tmp_path / "quarantine.jsonl", 0.5, 20, told.append)
    begin(ledger, keys)
    reasons = [Unscored(key, "p", "r", f"bad {key.row}") for key in keys[3:7]]
    quarantine.set_aside(keys, UnscoredSamples("no score", reasons))
    assert told == ["the prompt of row 3 and 3 more leave epoch 0: they have a sample without a score (4 of at most 10 "
                    "prompts; see quarantine.jsonl): bad 3"]


@pytest.mark.parametrize(("limit", "rows", "allowed"), [(0.29, 100, 29), (0.57, 100, 57), (0.05, 50, 2), (0.001, 9, 1)])
def test_the_limit_is_the_share_of_the_prompts_as_written(tmp_path, limit, rows, allowed):
    facts = LedgerFacts(2, 1, 0, (rows,), seed=0, shuffle=False, weights=(1.0,))
    ledger = Ledger.create(tmp_path / "ledger.sqlite", facts)
    quarantine = Quarantine(ledger, tmp_path / "quarantine.jsonl", limit, rows, lambda _: None)
    keys = [SampleKey(0, row, 0) for row in range(rows)]
    ledger.admit(keys, [rows])
    ledger.start_attempt(keys, 0)

    def leave(count):
        quarantine.set_aside(keys[:count], UnscoredSamples("no score", [
            Unscored(key, "p", "r", "bad") for key in keys[:count]]))

    leave(allowed)
    with pytest.raises(RewardError, match=f"lets {allowed} "):
        leave(allowed + 1)


@pytest.mark.parametrize(("limit", "rows"), [(1.0, 4), (0.01, 1)])
def test_the_last_prompt_does_not_leave_whatever_the_limit(ppo_config, summary, limit, rows):
    """A run without it would draw all prompts again and again, epoch by epoch."""
    harness = QuarantineHarness(ppo_config(prompts=2, chunk=1, steps=1), summary, bad=range(50))
    harness.pipeline.quarantine = Quarantine(harness.ledger, harness.file, limit, rows, harness.warnings.append)
    with pytest.raises(RewardError, match=f"{rows} of {rows} prompts have .* lets {rows - 1} leave the run"):
        play(harness, 1)
