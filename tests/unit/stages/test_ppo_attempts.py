"""What a stretch of a run leaves behind when a worker is lost in it."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from rlhf_ray.config.training_loop import LoggingConfig
from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.errors import CheckpointError, WorkerError
from rlhf_ray.files.writer_thread import RunFiles
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.ledger import Ledger
from rlhf_ray.replay.ledger_tables import LedgerFacts
from rlhf_ray.stages.ppo_attempts import RunAttempts, check_open_samples
from tests.unit.replay.ledgers import begin


def test_chunks_begun_again_are_dropped_before_their_ledger_is_closed(tmp_path):
    done = []

    async def close():
        done.append("pipeline closed")

    async def restore(_):
        return ["a place"]

    async def make_generators_agree():
        return True

    async def lost_learner(_):
        raise WorkerError("policy_learner/0 died in export")

    @asynccontextmanager
    async def changing():
        yield

    async def forget():
        done.append("no catch-up is under way")

    coordinator = SimpleNamespace(
        weights=SimpleNamespace(changing=changing, forget=forget), recovery=SimpleNamespace(restore=restore),
        state=SimpleNamespace(step=0, cursor=SimpleNamespace(position=[0])), open_keys=list,
        progress=SimpleNamespace(note=lambda _: None),
        pipeline=SimpleNamespace(resume=lambda: done.append("resumed"), close=close, journals=None,
                                 ledger=SimpleNamespace(close=lambda: done.append("ledger closed"), open_keys=set,
                                                        position=lambda: [0])),
        best=SimpleNamespace(resume=lost_learner), files=RunFiles(), make_generators_agree=make_generators_agree,
    )
    attempts = RunAttempts(LoggingConfig(), RunDirectory(tmp_path), None, lambda *_: coordinator)
    metrics, start = SimpleNamespace(dropped=[]), SimpleNamespace(step=0, path=tmp_path)
    with pytest.raises(WorkerError, match="died in export"):
        asyncio.run(attempts.attempt(metrics, start, 0, again=False))
    assert done == ["resumed", "pipeline closed", "ledger closed", "no catch-up is under way"]


def resumed(tmp_path, open_keys, drawn):
    """What a run goes on with whose checkpoint's ledger has two open prompts of three: chunks, and the cursor."""
    facts = LedgerFacts(1, 1, 1, (5,), 0, False, (1.0,))
    ledger = Ledger.create(tmp_path / "ledger.sqlite", facts)
    begin(ledger, [SampleKey(0, row, 0) for row in range(3)])
    ledger.quarantine([SampleKey(0, 0, 0)], "no score")
    ledger.give_up([SampleKey(0, 2, 0)], "its worker died")
    cursor = PromptCursor(5, 0, shuffle=False)
    cursor.next(drawn)
    return SimpleNamespace(pipeline=SimpleNamespace(ledger=ledger), state=SimpleNamespace(cursor=cursor),
                           open_keys=lambda: [SampleKey(0, row, 0) for row in open_keys])


def test_a_checkpoint_whose_ledger_and_state_agree_is_gone_on_from(tmp_path):
    check_open_samples(resumed(tmp_path, [1, 2], 3), tmp_path)


@pytest.mark.parametrize(("open_keys", "drawn", "said"), [
    ([1], 3, r"disagree on 1 open samples, such as \(epoch, row, sample\) \(0, 2, 0\)"),
    ([0, 1, 2], 3, r"such as \(epoch, row, sample\) \(0, 0, 0\)"),
    ([1, 2], 4, r"\[3\] prompts of each source are handed out according to its ledger, \[4\] according to its data")])
def test_a_checkpoint_that_would_lose_a_sample_or_make_one_twice_is_refused(tmp_path, open_keys, drawn, said):
    with pytest.raises(CheckpointError, match=said):
        check_open_samples(resumed(tmp_path, open_keys, drawn), tmp_path)


def test_what_learners_were_doing_for_generators_is_over_before_they_are_replaced(tmp_path):
    done = []

    async def forget():
        await asyncio.sleep(0)
        done.append("no catch-up is under way")

    async def after(error):
        done.append("learners are replaced")
        raise error

    def build(*_):
        raise WorkerError("policy_learner/0 died")

    attempts = RunAttempts(LoggingConfig(), RunDirectory(tmp_path), SimpleNamespace(after=after), build)
    attempts.coordinator = SimpleNamespace(weights=SimpleNamespace(forget=forget))
    with pytest.raises(WorkerError, match="policy_learner/0 died"):
        asyncio.run(attempts.run(None, resume=False))
    assert done == ["no catch-up is under way", "learners are replaced"]
