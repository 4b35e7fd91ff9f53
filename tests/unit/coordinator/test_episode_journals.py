"""What the driver keeps of journals: a continued run takes over turns that its policy or an earlier one sampled, and
nothing is kept that no run could train on any more."""

import asyncio
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from rlhf_ray.coordinator import episode_journals
from rlhf_ray.coordinator.episode_journals import EpisodeJournals
from rlhf_ray.files.writer_thread import FileThread
from rlhf_ray.records import SampleKey
from rlhf_ray.roles import episode_journal
from rlhf_ray.roles.engines.interface import Completion
from rlhf_ray.roles.episode_journal import (
    Journal,
    JournalReader,
    RecordedOutcome,
    RecordedStart,
    RecordedTurn,
    episode,
    longest,
)
from tests.unit.coordinator.stand_ins import StandInGroup

KEYS = [SampleKey(0, row, 0) for row in range(8)]


@pytest.fixture(autouse=True)
def rewritten_early(monkeypatch):
    monkeypatch.setattr(episode_journal, "KEPT_BYTES", 0)


def turn_of(*versions):
    number = len(versions)
    sampled = Completion(np.arange(number, dtype=np.int32), np.zeros(number, np.float32), np.array(versions, np.int32),
                         "stop")
    return RecordedTurn("", sampled, {"messages": [], "reward": 1.0})


class Run:
    """A run whose runners are journal writers."""

    def __init__(self, root, max_staleness=0, kind="a", runners=1, term=0):
        self.root = root
        self.state = SimpleNamespace(step=0, published=0)
        self.files = FileThread("records", 10)
        self.notes = []
        self.writers = {}
        self.group = StandInGroup("episode_runner", self.forget, workers=runners)
        self.journals = EpisodeJournals(root, self.group, self.state, max_staleness, kind, self.files,
                                        self.notes.append, term)

    async def forget(self, rank, method, directory, needed):
        assert method == "forget"
        writer = self.writers.get((rank, directory))
        if writer is None:
            return ""
        await writer.forget(needed.of)
        return writer.path.name

    async def play(self, key, *turns, rank=0, ended=False, cause="completed", use="train", **place):
        """Record an episode that a call now plays: a tuple of versions for each turn."""
        place = self.journals.place(**place)
        path = f"{place.directory}/runner-{rank}-{id(self)}.journal"
        writer = self.writers.setdefault((rank, place.directory), Journal(self.root / path, self.notes.append))
        await writer.append(RecordedStart(0, place.version, {}, 0.0).frame(place.scope, key))
        for versions in turns:
            await writer.append(turn_of(*versions).frame(place.scope, key))
        if ended:
            await writer.append(RecordedOutcome(cause, use, "", {}, None).frame(place.scope, key))

    async def step(self, committed):
        self.state.step += 1
        self.state.published = self.state.step
        await self.journals.step_over(committed)
        await self.journals._forgetting

    def known(self, scope="training"):
        """Key -> number of turns that journals on disk know."""
        found = {}
        for path in self.root.glob("*/*.journal"):
            reader = JournalReader(path)
            reader.refresh()
            for (its, key), entries in reader.entries.items():
                if its == scope and (best := episode(longest([entries], -1000))) is not None:
                    found[key.row] = len(best.turns)
        return found


def run_with(root, work, **more):
    async def go():
        run = Run(root, **more)
        await work(run)
        await run.journals.close()
        for writer in run.writers.values():
            writer.close()
        run.files.close()
        return run

    return asyncio.run(go())


def at(run, version):
    run.state.step = run.state.published = version


def test_a_continued_run_takes_over_the_turns_of_its_policy_and_discards_those_of_newer_ones(tmp_path):
    async def first(run):
        await run.journals.begin(continues=False)
        at(run, 3)
        await run.play(KEYS[0], (3, 3), (3,), ended=True)
        await run.play(KEYS[1], (3,), (3, 4), (4,))
        at(run, 4)
        await run.play(KEYS[2], (4,), (4,))

    async def second(run):
        at(run, 3)
        await run.journals.begin(continues=True)
        assert run.known() == {0: 2, 1: 1}
        assert run.journals.place().look
        at(run, 4)
        assert run.journals.place().look and run.journals.place(evaluation=True).scope != "training"
        at(run, 5)
        assert not run.journals.place().look, "nothing of it can be trained on"
        assert run.journals.place(repeated=True).look
        [directory] = run.root.iterdir()
        reader = JournalReader(directory / "adopted.journal")
        reader.refresh()
        assert episode(reader.entries["training", KEYS[0]]).outcome.cause == "completed"
        assert episode(reader.entries["training", KEYS[1]]).outcome is None

    run_with(tmp_path, first, max_staleness=1)
    run = run_with(tmp_path, second, max_staleness=1)
    assert run.notes == ["2 episodes go on from their journals, after 3 turns; 4 turns of newer policies are played "
                         "again"]


def test_what_failed_is_played_again_and_what_a_deadline_ended_stays_so(tmp_path):
    """The environment may have been put right before the run is resumed."""
    ends = [("error_environment", "quarantine"), ("error_environment", "zero"), ("error_timeout", "quarantine"),
            ("error_timeout", "mask"), ("truncated_turns", "train")]

    async def first(run):
        await run.journals.begin(continues=False)
        for key, (cause, use) in zip(KEYS, ends, strict=False):
            await run.play(key, (0,), ended=True, cause=cause, use=use)

    async def second(run):
        await run.journals.begin(continues=True)
        assert run.known() == {3: 1, 4: 1}

    run_with(tmp_path, first)
    run_with(tmp_path, second)


def test_a_directory_that_was_replaced_and_could_not_be_removed_is_not_read(tmp_path):
    """Its turns are of policies of which the run, which went back to an older checkpoint, has made others since."""
    async def first(run):
        await run.journals.begin(continues=False)
        at(run, 2)
        await run.play(KEYS[2], (2,))

    async def again(run):
        at(run, 1)
        await run.journals.begin(continues=True)
        at(run, 2)
        await run.play(KEYS[3], (2,))

    async def last(run):
        at(run, 2)
        await run.journals.begin(continues=True)
        assert run.known() == {3: 1}

    run_with(tmp_path / "episodes", first)
    [left] = (tmp_path / "episodes").iterdir()
    shutil.copytree(left, tmp_path / left.name)
    run_with(tmp_path / "episodes", again)
    shutil.copytree(tmp_path / left.name, left)
    run_with(tmp_path / "episodes", last)


def test_a_driver_that_is_killed_while_it_takes_journals_over_loses_none(tmp_path, monkeypatch):
    class Killed(BaseException):
        """As kill -9 would end it."""

    def killed(*_):
        raise Killed

    async def first(run):
        await run.journals.begin(continues=False)
        await run.play(KEYS[0], (0,))

    async def again(run):
        await run.journals.begin(continues=True)
        assert run.known() == {0: 1}

    run_with(tmp_path, first)
    for step in ("adopt", "write_atomically"):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(episode_journals, step, killed)
            run_with(tmp_path, again)
    run_with(tmp_path, again)


def test_a_driver_that_was_superseded_removes_nothing_of_its_successor(tmp_path):
    async def successor(run):
        await run.journals.begin(continues=False)
        await run.play(KEYS[0], (0,))

    async def superseded(run):
        await run.journals.discard()
        await run.journals.end()

    run_with(tmp_path, successor, term=2)
    run = run_with(tmp_path, superseded, term=1)
    assert run.known() == {0: 1}


def test_damaged_facts_are_those_of_no_configuration(tmp_path):
    async def first(run):
        await run.journals.begin(continues=False)
        await run.play(KEYS[0], (0,))

    async def second(run):
        await run.journals.begin(continues=True)
        assert run.known() == {}

    for damaged in (b"", b"\xff\xfe", b"[1]", b"{}"):
        run_with(tmp_path, first)
        [facts] = tmp_path.glob("*/facts.json")
        facts.write_bytes(damaged)
        run_with(tmp_path, second)


def test_nothing_is_taken_over_that_is_too_old_to_train_on(tmp_path):
    async def first(run):
        await run.journals.begin(continues=False)
        for version in (1, 2):
            at(run, version)
            await run.play(KEYS[version], (version,))

    async def second(run):
        at(run, 3)
        await run.journals.begin(continues=True)
        assert run.known() == {2: 1}

    run_with(tmp_path, first, max_staleness=1)
    run_with(tmp_path, second, max_staleness=1)


@pytest.mark.parametrize("more", [{"kind": "b"}, {"continues": False}])
def test_journals_of_another_configuration_or_of_a_run_that_starts_over_are_removed(tmp_path, more):
    async def first(run):
        await run.journals.begin(continues=False)
        await run.play(KEYS[0], (0,))

    async def second(run):
        await run.journals.begin(continues=more.get("continues", True))
        assert run.known() == {}
        assert not run.journals.place().look
        assert len(list(run.root.iterdir())) == 1

    run_with(tmp_path, first)
    run_with(tmp_path, second, kind=more.get("kind", "a"))


def test_records_are_forgotten_when_a_run_that_continues_would_not_need_them(tmp_path):
    """At max_staleness 0 with checkpoints of steps 2 and 4: a run that continues from step 2 needs what version 2
    played; what version 3 played would be of a newer policy."""
    async def work(run):
        await run.journals.begin(continues=False)
        kept = []
        for committed in (-1, -1, 2, 2, 4):
            turns = {2: 3, 4: 1}.get(run.state.step, 20)  # a file is rewritten when most of it is forgotten
            await run.play(KEYS[run.state.step], *[(run.state.step,)] * turns, ended=True)
            await run.step(committed)
            kept.append(sorted(run.known()))
        assert kept == [[], [], [2], [2], [4]]

    run_with(tmp_path, work)


def test_the_file_of_a_lost_runner_goes_once_nothing_in_it_can_be_trained_on(tmp_path):
    async def work(run):
        await run.journals.begin(continues=False)
        await run.play(KEYS[0], (0,), rank=1)
        run.writers.pop(next(iter(run.writers)))  # its process is another one now
        await run.play(KEYS[1], (0,), rank=0)
        await run.step(0)
        assert run.known() == {0: 1, 1: 1}
        await run.step(1)
        assert 0 in run.known()
        await run.step(2)
        assert run.known() == {} and not list(run.root.glob("*/*.journal"))

    run_with(tmp_path, work, runners=2)


def test_an_evaluation_has_its_own_scope_and_is_forgotten_after_the_next_step(tmp_path):
    async def work(run):
        await run.journals.begin(continues=False)
        await run.play(KEYS[0], (0,), (0,), evaluation=True)
        await run.play(KEYS[0], (0,))
        assert run.known("evaluation of version 0") == {0: 2}
        assert run.known() == {0: 1}
        await run.step(0)
        assert run.known("evaluation of version 0") == {}

    run_with(tmp_path, work)


def test_what_was_sampled_with_damaged_weights_is_taken_over_by_nobody(tmp_path):
    async def work(run):
        await run.journals.begin(continues=False)
        await run.play(KEYS[0], (0,))
        await run.journals.discard()
        assert run.known() == {}
        await run.play(KEYS[0], (0,), (0,))
        assert run.known() == {0: 2}

    run_with(tmp_path, work)


def test_nothing_is_taken_over_that_an_update_has_just_made_too_old(tmp_path):
    async def work(run):
        run.state.step, run.state.published = 5, 4
        assert run.journals.place().oldest == 4
        assert run.journals.place(evaluation=True).oldest == 4

    run_with(tmp_path, work, max_staleness=1)


def test_no_file_is_left_at_the_end(tmp_path):
    async def work(run):
        await run.journals.begin(continues=False)
        await run.play(KEYS[0], (0,))
        await run.journals.end()
        assert not run.root.exists()

    run_with(tmp_path / "episodes", work)


def test_a_directory_that_cannot_be_made_is_a_note_and_no_error(tmp_path):
    (tmp_path / "episodes").write_text("")

    async def work(run):
        await run.journals.begin(continues=True)

    run = run_with(tmp_path / "episodes", work)
    assert "episodes begin again" in run.notes[0]
