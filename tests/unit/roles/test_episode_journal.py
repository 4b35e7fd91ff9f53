"""Journals of episodes: what is read of a file that is damaged or being written, what is forgotten, and what a run that
continues takes over."""

import asyncio
import os
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from rlhf_ray.coordinator.episode_journals import Adopted, adopt
from rlhf_ray.records import SampleKey
from rlhf_ray.roles import episode_journal
from rlhf_ray.roles.engines.interface import Completion
from rlhf_ray.roles.episode_journal import (
    FILE_HEAD_BYTES,
    FORMAT,
    HEAD,
    TRAINING,
    Journal,
    JournalReader,
    Needed,
    RecordedEpisode,
    RecordedOutcome,
    RecordedStart,
    RecordedTurn,
    digest,
    episode,
    last_attempt,
    longest,
)

A, B = SampleKey(0, 1, 2), SampleKey(1, 3, 0)
RESET = {"messages": [{"role": "user", "content": "é 😀"}], "tools": [], "observation": ""}
ANSWER = {"messages": [], "reward": 1 / 3, "done": False, "truncated": False, "info": {"a": 0.1}, "tool_errors": 0}


def start(attempt=0, version=0, **events):
    return RecordedStart(attempt, version, events, 0.5)


def turn(version=0, answer=ANSWER, size=3, masks=True, **given):
    random = np.random.default_rng(version)
    each = tuple(random.integers(0, 9, length).astype(np.int32) for length in range(size)) if masks else ()
    completion = Completion(np.arange(size, dtype=np.int32), random.random(size).astype(np.float32),
                            np.full(size, version, np.int32), "stop", each)
    snapshot = answer and {"json": [version]}
    return RecordedTurn(digest([1, 2]), completion, answer, **{"snapshot": snapshot, "age_s": 1.5, **given})


ENDED = RecordedOutcome("error_timeout", "mask", "late", {"retries": 1}, None)


def written(path, *episodes):
    """A journal with episodes: (key, episode), or (key, episode, scope)."""
    frames = [frame for key, each, *scope in episodes for frame in each.frames(*(scope or [TRAINING]), key)]
    path.write_bytes(file_head() + b"".join(frame.encoded() for frame in frames))
    return path


def file_head():
    return FORMAT + os.urandom(FILE_HEAD_BYTES - len(FORMAT))


def read(path, key=A, scope=TRAINING):
    reader = JournalReader(path)
    reader.refresh()
    return episode(last_attempt(reader.entries.get((scope, key), [])))


def assert_equal(found, expected):
    assert (found.start, found.reset, found.outcome) == (expected.start, expected.reset, expected.outcome)
    assert len(found.turns) == len(expected.turns)
    newest = max((i for i, each in enumerate(expected.turns) if each.snapshot), default=None)
    for number, (one, other) in enumerate(zip(found.turns, expected.turns, strict=True)):
        snapshot = other.snapshot if number == newest else None
        assert replace(one, completion=None) == replace(other, completion=None, snapshot=snapshot)
        for name in ("tokens", "logprobs", "versions"):
            mine, given = getattr(one.completion, name), getattr(other.completion, name)
            assert mine.dtype == given.dtype and mine.tobytes() == given.tobytes()
        assert [each.tolist() for each in one.completion.masks] == [each.tolist() for each in other.completion.masks]
        assert one.completion.finish_reason == other.completion.finish_reason


@pytest.mark.parametrize("each", [
    RecordedEpisode(start(2, 3, retries=2)),
    RecordedEpisode(start(), RESET, [turn(1), turn(2, size=0, masks=False), turn(3, size=1)]),
    RecordedEpisode(start(), RESET, [turn(1, masks=False), turn(2, answer=None, interrupted=4)], ENDED),
])
def test_an_episode_is_read_as_it_was_written(tmp_path, each):
    assert_equal(read(written(tmp_path / "a.journal", (B, RecordedEpisode(start(7))), (A, each))), each)


def test_the_last_turn_of_an_episode_whose_outcome_is_torn_off_is_played_again(tmp_path):
    whole = RecordedEpisode(start(), RESET, [turn(1), turn(2, answer=None)])
    assert_equal(read(written(tmp_path / "a.journal", (A, whole))), replace(whole, turns=whole.turns[:1]))


def test_another_format_is_not_read(tmp_path):
    path = written(tmp_path / "a.journal", (A, RecordedEpisode(start(), RESET, [turn(1)])))
    path.write_bytes(b"EPJ0" + path.read_bytes()[4:])
    assert read(path) is None


@pytest.mark.parametrize("damage", ["cut", "flipped", "long"])
def test_a_damaged_file_is_read_up_to_the_damage(tmp_path, damage):
    whole = RecordedEpisode(start(), RESET, [turn(1), turn(2), turn(3)])
    path = written(tmp_path / "a.journal", (A, whole))
    sizes = [len(frame.encoded()) for frame in whole.frames(TRAINING, A)]
    data = path.read_bytes()
    for number in range(len(sizes)):
        place = FILE_HEAD_BYTES + sum(sizes[:number])
        for at in range(place, place + sizes[number], 1 if number == 2 else 40):
            changed = bytearray(data)
            if damage == "cut":
                del changed[at:]
            elif damage == "flipped":
                changed[at] ^= 1 << at % 8
            else:
                HEAD.pack_into(changed, place, HEAD.unpack_from(data, place)[0], 5, 0xfffffff0)
            path.write_bytes(changed)
            found = read(path)
            if number == 0:
                assert found is None
            else:
                expected = replace(whole, turns=whole.turns[:max(0, number - 2)], reset=RESET if number > 1 else None)
                assert_equal(found, expected)


def test_a_reader_follows_a_file_that_is_being_written_and_read_again_what_was_put_in_its_place(tmp_path):
    path = tmp_path / "a.journal"
    reader = JournalReader(path)
    reader.refresh()
    assert reader.entries == {}
    one = RecordedEpisode(start(), RESET, [turn(1)])
    data = file_head() + b"".join(frame.encoded() for frame in one.frames(TRAINING, A))
    with path.open("wb", buffering=0) as file:
        for at in range(len(data)):
            file.write(data[at:at + 1])
            if at % 7 == 0:
                reader.refresh()
    reader.refresh()
    old = reader.entries[TRAINING, A]
    assert_equal(episode(old), one)
    two = RecordedEpisode(start(), RESET, [turn(2)])
    written(tmp_path / "b", (B, two)).rename(path)
    assert episode(old) is None, "what it had read is there no more"
    reader.refresh()
    assert list(reader.entries) == [(TRAINING, B)]
    assert_equal(episode(reader.entries[TRAINING, B]), two)
    path.unlink()
    reader.refresh()
    assert episode(reader.entries[TRAINING, B]) is None


def test_a_frame_that_another_one_of_the_same_size_replaces_is_not_taken_for_it(tmp_path):
    """As when a runner forgets one of two episodes that look alike."""
    each = RecordedEpisode(start(), RESET, [turn(1)])
    path = written(tmp_path / "a.journal", (A, each), (SampleKey(0, 1, 3), each))
    reader = JournalReader(path)
    reader.refresh()
    written(tmp_path / "b", (SampleKey(0, 1, 3), each)).rename(path)
    assert episode(reader.entries[TRAINING, A]) is None


def test_of_several_attempts_the_last_is_gone_on_with_and_of_several_files_the_one_that_came_furthest(tmp_path):
    short, longer = RecordedEpisode(start(), RESET, [turn(1)]), RecordedEpisode(start(), RESET, [turn(1), turn(1)])
    later = RecordedEpisode(start(1), RESET)
    ended = RecordedEpisode(start(), None, [], ENDED)
    old = RecordedEpisode(start(5, version=-3), RESET, [turn(1)])
    files = {}
    for name, episodes in {"short": [short], "longer": [longer], "later": [longer, later], "ended": [ended],
                           "old": [old]}.items():
        reader = JournalReader(written(tmp_path / name, *((A, each) for each in episodes)))
        reader.refresh()
        files[name] = reader.entries[TRAINING, A]

    def furthest(*names):
        return longest([files[name] for name in names], 0)[0].path.name

    assert furthest("short", "longer") == "longer" and furthest("longer", "later", "ended") == "later"
    assert furthest("longer", "ended", "short") == "ended" and furthest("old", "short") == "short"
    assert longest([files["old"]], 0) == [] and len(longest([files["later"]], 0)) == 2


def test_a_journal_is_rewritten_without_what_is_forgotten_and_goes_on(tmp_path, monkeypatch):
    path = tmp_path / "a.journal"
    one, two = RecordedEpisode(start(), RESET, [turn(1)]), RecordedEpisode(start(1), RESET, [turn(2), turn(3)])

    async def live():
        journal = Journal(path, pytest.fail)
        await journal.append(*one.frames(TRAINING, A))
        await journal.append(*two.frames("evaluation", A), *one.frames(TRAINING, B))
        size = path.stat().st_size
        await journal.forget(lambda scope, records: scope == "evaluation")
        assert path.stat().st_size == size, "it is small still"
        monkeypatch.setattr(episode_journal, "KEPT_BYTES", 0)
        await journal.forget(lambda scope, records: True)
        assert path.stat().st_size < size and not list(tmp_path.glob("*.new"))
        assert read(path) is None and read(path, B) is None
        assert_equal(read(path, A, "evaluation"), two)
        await journal.append(turn(4).frame("evaluation", A), *one.frames(TRAINING, B))
        assert_equal(read(path, A, "evaluation"), replace(two, turns=[*two.turns, turn(4)]))
        await journal.forget(lambda scope, records: [each.kind for each in records] == ["start", "reset", "turn"])
        assert read(path, A, "evaluation") is None
        assert_equal(read(path, B), one)
        await journal.forget(lambda *_: False)
        assert not path.exists()
        await journal.append(*one.frames(TRAINING, A))
        assert_equal(read(path), one)
        journal.close()
        await journal.append(*two.frames(TRAINING, B))
        assert read(path, B) is None

    asyncio.run(live())


def test_a_journal_finds_what_others_wrote_and_what_it_wrote_itself(tmp_path):
    each, longer = (RecordedEpisode(start(), RESET, [turn(1)] * number) for number in (1, 2))

    async def live():
        journal = Journal(tmp_path / "mine.journal", pytest.fail)
        await journal.append(*each.frames(TRAINING, A))
        assert_equal(await journal.find(TRAINING, A, 0), each)
        other = written(tmp_path / "other.journal", (A, longer))
        assert len((await journal.find(TRAINING, A, 0)).turns) == 2
        assert await journal.find("evaluation", A, 0) is None and await journal.find(TRAINING, B, 0) is None
        assert await journal.find(TRAINING, A, oldest=1) is None
        other.unlink()
        assert_equal(await journal.find(TRAINING, A, 0), each)
        journal.close()

    asyncio.run(live())


def test_a_disk_that_hangs_holds_nobody_and_nothing_is_written_after_it(tmp_path, monkeypatch):
    monkeypatch.setattr(episode_journal, "PATIENCE_S", 0.2)
    release, write, said = threading.Event(), episode_journal._write, []

    def hangs(*args):
        release.wait()
        write(*args)

    async def live():
        journal = Journal(tmp_path / "a.journal", said.append)
        await journal.append(start().frame(TRAINING, A))
        monkeypatch.setattr(episode_journal, "_write", hangs)
        began = time.monotonic()
        await asyncio.gather(*(journal.append(turn(each).frame(TRAINING, A)) for each in range(9)))
        await journal.append(turn(10).frame(TRAINING, A))
        assert await journal.find(TRAINING, B, 0) is None
        assert time.monotonic() - began < 2.0 and len(said) == 1 and "a.journal has made no progress" in said[0]

    asyncio.run(live())
    release.set()
    time.sleep(0.1)
    assert len(read(tmp_path / "a.journal").turns) <= 9


def test_a_full_disk_leaves_what_was_written_whole(tmp_path, monkeypatch):
    said = []
    first = RecordedEpisode(start(), RESET, [turn(1)])

    def half(file, data):
        os.write(file, data[:len(data) // 2])
        raise OSError(28, "No space left on device")

    async def live():
        journal = Journal(tmp_path / "a.journal", said.append)
        await journal.append(*first.frames(TRAINING, A))
        monkeypatch.setattr(episode_journal, "_write", half)
        await journal.append(turn(2).frame(TRAINING, A))
        monkeypatch.undo()
        await journal.append(turn(3).frame(TRAINING, A))
        await journal.forget(lambda *_: False)

    asyncio.run(live())
    assert_equal(read(tmp_path / "a.journal"), first)
    assert len(said) == 1 and "No space left on device" in said[0]


def test_a_run_that_continues_takes_over_turns_up_to_the_first_that_a_newer_policy_sampled(tmp_path):
    keys = [SampleKey(0, row, 0) for row in range(6)]
    mixed = RecordedEpisode(start(version=4), RESET, [turn(4), turn(5), turn(6), turn(5)], ENDED)
    newer = RecordedEpisode(start(version=6), RESET, [turn(6)])
    whole = RecordedEpisode(start(version=5), RESET, [turn(5)], ENDED)
    old = RecordedEpisode(start(version=2), RESET, [turn(5)])
    none = RecordedEpisode(start(version=5), RESET, [turn(6), turn(6)])
    files = [
        written(tmp_path / "one", (keys[0], mixed), (keys[1], newer), (keys[2], whole), (keys[5], whole, "evaluation")),
        written(tmp_path / "two", (keys[3], old), (keys[4], none), (keys[2], replace(whole, outcome=None)))]
    target = tmp_path / "new.journal"
    # Of turns: two of `mixed`, one of `whole` (in either file), none of `none`. Again: 2 + 1 + 0 + 2.
    assert adopt(files, target, version=5, oldest=4) == Adopted(3, 3, 5)
    assert_equal(read(target, keys[0]), replace(mixed, turns=mixed.turns[:2], outcome=None))
    assert_equal(read(target, keys[2]), whole)
    assert_equal(read(target, keys[4]), replace(none, turns=[]))
    assert [read(target, keys[number]) for number in (1, 3)] == [None, None]
    assert read(target, keys[5], "evaluation") is None
    nothing = tmp_path / "nothing.journal"
    assert adopt(files, nothing, version=1, oldest=1) == Adopted(0, 0, 10) and not nothing.exists()


@pytest.mark.parametrize("needed, expected", [
    (Needed(5, 5, 0), {"now"}),
    (Needed(5, 4, 0), {"now", "before", "mixed"}),
    (Needed(5, 4, 1), {"now", "before", "mixed"}),
    (Needed(6, 4, 1), {"now", "before", "mixed"}),
    (Needed(7, 7, 0, "evaluation"), {"evaluation"}),
])
def test_what_may_be_trained_on_or_played_again_is_needed(tmp_path, needed, expected):
    """A run that continues from a checkpoint of version 4 takes over what began at 4, as far as 4 has sampled it. At a
    staleness of 1 that may be trained on at 5, too."""
    episodes = {
        "now": ((SampleKey(0, 0, 0), RecordedEpisode(start(version=5), RESET, [turn(5)]))),
        "before": ((SampleKey(0, 1, 0), RecordedEpisode(start(version=4), RESET, [turn(4)]))),
        "mixed": ((SampleKey(0, 2, 0), RecordedEpisode(start(version=4), RESET, [turn(4), turn(5)]))),
        "old": ((SampleKey(0, 3, 0), RecordedEpisode(start(version=2), RESET, [turn(2)]))),
        "evaluation": ((SampleKey(0, 0, 0), RecordedEpisode(start(version=5), RESET, [turn(5)]), "evaluation")),
    }
    found = set()
    for name, each in episodes.items():
        reader = JournalReader(written(tmp_path / name, each))
        reader.refresh()
        [((scope, _), records)] = reader.entries.items()
        if needed.of(scope, records):
            found.add(name)
    assert found == expected
