"""Journals of episodes: what is needed to go on with an episode whose runner or driver was lost.

Each process of an episode runner appends to a file of its own: that an episode begins, how its environment answered
the reset, each of its turns before the next one is sampled, and how it ends. A successor reads the file and never
writes to it. A journal is no truth: an episode without one begins again, and gives the same samples wherever its
environment can be replayed. So its errors end no run, and it is written without fsync: it survives processes, not
machines.

    file: format (4 bytes), 12 random bytes | frames
    frame: crc32, length of the JSON, length of the arrays (4 bytes each) | JSON | arrays
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypeVar

import numpy as np

from rlhf_ray.errors import DiskStalled
from rlhf_ray.files.writer_thread import FileThread
from rlhf_ray.records import SampleKey
from rlhf_ray.roles.engines.interface import Completion

T = TypeVar("T")
SUFFIX = ".journal"
HEAD = struct.Struct("<III")
FORMAT = b"EPJ2"
"""What another version of this package wrote is not read."""
FILE_HEAD_BYTES = 16
PATIENCE_S = 5.0
"""A disk that has not taken a record for so long hangs: the journal is given up."""
KEPT_BYTES = 1 << 20
"""A journal is rewritten when more than this, and more than half of it, is of forgotten episodes."""
TRAINING = "training"
"""Scope of the episodes of training; each evaluation has one of its own."""


class JournalPlace(NamedTuple):
    """Where the episodes of a call are recorded."""

    directory: str
    """Of all runners of a run. A driver that continues the run begins another one."""
    version: int
    """Of the policy when the call was made."""
    oldest: int
    """The oldest policy whose tokens may be trained on then: of older ones nothing is taken over."""
    scope: str = TRAINING
    """Samples of other scopes may have the same keys."""
    look: bool = False
    """Whether other files in the directory may know some of the episodes."""


class Frame(NamedTuple):
    """One record in a file."""

    kind: str
    """"start", "reset", "turn" or "outcome"."""
    scope: str
    key: SampleKey
    newest: int
    """The newest version of the weights that sampled it; -1 without tokens."""
    facts: dict[str, Any]
    """Values that JSON holds."""
    arrays: dict[str, Any]

    def encoded(self) -> bytes:
        """The bytes in a file."""
        arrays = {name: np.ascontiguousarray(each) for name, each in self.arrays.items()}
        text = json.dumps([self.kind, self.scope, list(self.key.numbers), self.newest, self.facts,
                           [[name, each.dtype.str, len(each)] for name, each in arrays.items()]]).encode()
        body = b"".join([text, *(each.tobytes() for each in arrays.values())])
        return HEAD.pack(zlib.crc32(body), len(text), len(body) - len(text)) + body

    @classmethod
    def decoded(cls, data: bytes) -> Frame:
        """The inverse of `encoded`."""
        _, text, _ = HEAD.unpack_from(data)
        at = HEAD.size + text
        kind, scope, key, newest, facts, layout = json.loads(data[HEAD.size:at])
        arrays = {}
        for name, dtype, count in layout:
            arrays[name] = np.frombuffer(data, dtype, count, at)
            at += arrays[name].nbytes
        return cls(kind, scope, SampleKey(*key), newest, facts, arrays)


@dataclass(frozen=True)
class RecordedStart:
    """How an attempt at an episode began."""

    attempt: int
    """Its number, from 0, in all processes together."""
    version: int
    """Of the policy when it began."""
    events: dict[str, int]
    """What is counted of the attempts before, and of other processes."""
    age_s: float
    """Seconds that the episode had been played for, in all processes."""

    def frame(self, scope: str, key: SampleKey) -> Frame:
        """As a record."""
        return Frame("start", scope, key, -1, asdict(self), {})


@dataclass(frozen=True)
class RecordedTurn:
    """One turn of an episode, as it was."""

    context: str
    """`digest` of the tokens of its segment before it."""
    completion: Completion
    answer: dict[str, Any] | None
    """The fields of the `Step` that followed; None if none did, in the last turn of an episode that has ended, and in
    those of an agent."""
    snapshot: Any = None
    """Of the environment after its answer, if it gives any; of an episode that was read, only the newest."""
    interrupted: int = 0
    """How often the environment had been lost with neighbours in the process that recorded it."""
    age_s: float = 0.0
    """Seconds that the episode had been played for, in all processes."""
    asked: dict[str, Any] | None = None
    """What an agent asked, as `AgentTurn.asked`; None in an environment."""

    def frame(self, scope: str, key: SampleKey) -> Frame:
        """As a record."""
        whole = self.completion
        arrays: dict[str, Any] = {"tokens": whole.tokens, "logprobs": whole.logprobs, "versions": whole.versions}
        if whole.masks:
            arrays["mask_sizes"] = np.array([len(each) for each in whole.masks], dtype=np.int32)
            arrays["mask_tokens"] = np.concatenate(whole.masks)
        facts = {"context": self.context, "finish_reason": whole.finish_reason, "answer": self.answer,
                 "snapshot": self.snapshot, "interrupted": self.interrupted, "age_s": self.age_s, "asked": self.asked}
        return Frame("turn", scope, key, int(whole.versions.max(initial=-1)), facts, arrays)

    @classmethod
    def of(cls, frame: Frame) -> RecordedTurn:
        """The inverse of `frame`."""
        arrays = frame.arrays
        facts = dict(frame.facts)
        masks: tuple[Any, ...] = ()
        if "mask_sizes" in arrays:
            masks = tuple(np.split(arrays["mask_tokens"], np.cumsum(arrays["mask_sizes"])[:-1]))
        completion = Completion(
            arrays["tokens"], arrays["logprobs"], arrays["versions"], facts.pop("finish_reason"), masks)
        return cls(completion=completion, **facts)


@dataclass(frozen=True)
class RecordedOutcome:
    """How an episode ended."""

    cause: str
    use: Literal["train", "mask", "zero", "quarantine"]
    error: str
    events: dict[str, int]
    """As in `Episode.events`."""
    reward: float | None
    """What the environment gave the whole episode beside its turns; None if it was not asked, or did not answer."""
    metrics: dict[str, float] = field(default_factory=dict)
    """As in `Episode.metrics`."""
    left_out: list[str] = field(default_factory=list)
    """The recorded turns of an agent that are no part of the episode, by `AgentTurn.key`."""

    def frame(self, scope: str, key: SampleKey) -> Frame:
        """As a record."""
        return Frame("outcome", scope, key, -1, asdict(self), {})


@dataclass(frozen=True)
class RecordedEpisode:
    """What a journal knows of an episode: its last attempt."""

    start: RecordedStart
    reset: dict[str, Any] | None = None
    """The environment's answer to reset: messages, tools and observation, and its snapshot after it, if it gives any;
    None if it had not answered."""
    turns: Sequence[RecordedTurn] = ()
    outcome: RecordedOutcome | None = None
    """How it ended; None for an episode under way."""

    @property
    def age_s(self) -> float:
        """Seconds that it had been played for when it was recorded last."""
        return self.turns[-1].age_s if self.turns else self.start.age_s

    def frames(self, scope: str, key: SampleKey) -> list[Frame]:
        """As records."""
        found = [self.start.frame(scope, key)]
        if self.reset is not None:
            found.append(reset_frame(self.reset, scope, key))
        found += [turn.frame(scope, key) for turn in self.turns]
        if self.outcome is not None:
            found.append(self.outcome.frame(scope, key))
        return found


def reset_frame(answer: dict[str, Any], scope: str, key: SampleKey) -> Frame:
    """The record of an answer to reset."""
    return Frame("reset", scope, key, -1, answer, {})


def digest(tokens: Sequence[int]) -> str:
    """Of a segment's tokens."""
    return hashlib.blake2b(np.asarray(tokens, dtype=np.int32).tobytes(), digest_size=12).hexdigest()


@dataclass(frozen=True)
class Entry:
    """Where a record is."""

    kind: str
    newest: int
    attempt: int
    """Number of a "start"; else 0."""
    version: int
    """Of the policy at a "start"; else 0."""
    path: Path
    offset: int
    """Of its frame in the file, in bytes."""
    size: int
    crc: int
    """Of the frame: its file may have been rewritten since."""
    failed: bool = False
    """An "outcome" that may be another one when the environment is put right: it failed, or the prompt was left out."""

    @classmethod
    def of(cls, frame: Frame, path: Path, offset: int, data: bytes) -> Entry:
        """Of a frame at an offset of a file, where it is this data."""
        facts = frame.facts if frame.kind == "start" else {}
        failed = frame.kind == "outcome" and (
            frame.facts["cause"] == "error_environment" or frame.facts["use"] == "quarantine")
        return cls(frame.kind, frame.newest, facts.get("attempt", 0), facts.get("version", 0), path, offset, len(data),
                   HEAD.unpack_from(data)[0], failed)

    def read(self) -> bytes:
        """The frame. Raises OSError if it is not there any more."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = _next_data(file)
        if data is None or HEAD.unpack_from(data)[0] != self.crc:
            raise OSError(f"{self.path} was rewritten")
        return data


class JournalReader:
    """Reads a file that another process has written, or is still writing: up to the first frame that is not whole.

    Example:
        >>> reader = JournalReader(Path("episodes/1f/episode_runner-0-9c.journal"))
        >>> reader.refresh()
        >>> episode(reader.entries["training", SampleKey(0, 12, 3)]).turns
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[tuple[str, SampleKey], list[Entry]] = {}
        """By scope and key, oldest first."""
        self._read = 0
        self._head = b""

    def refresh(self) -> None:
        """Read what was appended since the last time, or all of a file that was put in its place. A file that is gone,
        or cannot be read, has no more."""
        with suppress(OSError), self.path.open("rb") as file:
            head = file.read(FILE_HEAD_BYTES)
            if head != self._head:
                self.entries.clear()
                self._read = FILE_HEAD_BYTES
                self._head = head
            if not head.startswith(FORMAT):
                return
            file.seek(self._read)
            while (data := _next_data(file)) is not None:
                frame = Frame.decoded(data)
                entry = Entry.of(frame, self.path, self._read, data)
                self.entries.setdefault((frame.scope, frame.key), []).append(entry)
                self._read += len(data)


def _next_data(file: BinaryIO) -> bytes | None:
    """The next frame of a file; None if it is not whole."""
    head = file.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    crc, text, arrays = HEAD.unpack(head)
    if text + arrays > os.fstat(file.fileno()).st_size:  # nothing is read for a damaged length
        return None
    body = file.read(text + arrays)
    if len(body) < text + arrays or zlib.crc32(body) != crc:
        return None
    return head + body


def last_attempt(entries: Iterable[Entry]) -> list[Entry]:
    """The records of the last attempt."""
    found: list[Entry] = []
    for entry in entries:
        found = [entry] if entry.kind == "start" else [*found, entry]
    return found if found and found[0].kind == "start" else []


def longest(candidates: Iterable[Sequence[Entry]], oldest: int) -> list[Entry]:
    """The records of the attempt that came furthest, of those that began with a policy that is old enough.

    Args:
        candidates: the records of an episode in each file.
        oldest: see `JournalPlace`.
    """
    attempts = [last for entries in candidates if (last := last_attempt(entries)) and last[0].version >= oldest]
    return max(attempts, default=[], key=lambda each: (each[0].attempt, each[-1].kind == "outcome", len(each)))


def episode(entries: Sequence[Entry]) -> RecordedEpisode | None:
    """What the records of one attempt say, read from their file; None if there are none, or the file is gone."""
    found: RecordedEpisode | None = None
    with suppress(OSError, KeyError, TypeError, ValueError):  # another version of this package may have written it
        for entry in entries:
            frame = Frame.decoded(entry.read())
            if frame.kind == "start":
                found = RecordedEpisode(RecordedStart(**frame.facts))
            elif found is None:
                return None
            elif frame.kind == "reset":
                found = replace(found, reset=frame.facts)
            elif frame.kind == "turn":
                turn, before = RecordedTurn.of(frame), found.turns
                if turn.snapshot is not None:  # which may be large, and replaces those before
                    before = [replace(each, snapshot=None) for each in before]
                    reset = {name: each for name, each in (found.reset or {}).items() if name != "snapshot"}
                    found = replace(found, reset=reset or None)
                found = replace(found, turns=[*before, turn])
            else:
                found = replace(found, outcome=RecordedOutcome(**frame.facts))
    if found is not None and found.outcome is None and found.turns:
        last = found.turns[-1]
        if last.answer is None and last.asked is None:
            return replace(found, turns=found.turns[:-1])  # its outcome, which was written together with it, is torn
    return found


class Journal:
    """The journal of this process: a file, and the thread that writes it and reads those of other processes beside it.
    Used from one event loop.

    Example:
        journal = Journal(Path("episodes/1f/episode_runner-0-9c.journal"), warn)
        await journal.append(turn.frame("training", key))
        await journal.find("training", key, oldest=7)
        await journal.forget(needed.of)
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        """`warn` is told, once, that the file cannot be written; nothing is recorded from then on."""
        self.path = path
        self._off = False
        """Nothing is recorded any more."""
        self._warn = warn
        self._thread = FileThread("episode journal", PATIENCE_S)
        self._waiting: list[Frame] = []
        self._next: Future[None] | None = None
        """The job that writes what waits: all that comes until it begins, in one call. `_lock` guards both."""
        self._lock = threading.Lock()
        # Of the thread:
        self._file = -1
        self._live: dict[tuple[str, SampleKey], list[Entry]] = {}
        self._live_bytes = self._all_bytes = 0
        self._others: dict[Path, JournalReader] = {}

    async def append(self, *frames: Frame) -> None:
        """Record, and wait until the file has it."""
        if self._off:
            return
        with self._lock:
            self._waiting += frames
            if self._next is None:
                self._next = self._thread.submit(self._append)
            written = self._next
        await self._wait(written)

    async def find(self, scope: str, key: SampleKey, oldest: int) -> RecordedEpisode | None:
        """What this file and the others in the directory know of an episode.

        Args:
            oldest: see `JournalPlace`.
        """
        return await self._run(self._find, scope, key, oldest)

    async def forget(self, needed: Callable[[str, Sequence[Entry]], bool]) -> None:
        """Forget episodes.

        Args:
            needed: whether an episode is needed still, by its scope and its records.
        """
        await self._run(self._forget, needed)

    def close(self) -> None:
        """Record nothing any more, and let the thread end once its work is done."""
        self._off = True
        if self._thread.ident is not None:
            self._thread.submit(self._close)
            self._thread.close()

    async def _run(self, job: Callable[..., T], *args: Any) -> T | None:
        return None if self._off else await self._wait(self._thread.submit(job, *args))

    async def _wait(self, job: Future[T]) -> T | None:
        try:
            return await self._thread.wait(job)
        except DiskStalled:
            self._give_up(f"has made no progress for {PATIENCE_S:g} s")
        except OSError as error:
            self._give_up(f"failed ({error})")
        return None

    def _give_up(self, why: str) -> None:
        if not self._off:
            self._warn(f"the journal of episodes {self.path} {why}. From now on episodes begin again if their runner "
                       "is lost. Check the disk of run.dir")
            self.close()

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _append(self) -> None:
        with self._lock:
            frames, self._waiting = self._waiting, []
            self._next = None
        written = [frame.encoded() for frame in frames]
        if self._file < 0:
            self._file = write_frames(self.path, ())
            self._all_bytes = FILE_HEAD_BYTES
        _write(self._file, b"".join(written))
        for frame, data in zip(frames, written, strict=True):
            entry = Entry.of(frame, self.path, self._all_bytes, data)
            self._live.setdefault((frame.scope, frame.key), []).append(entry)
            self._live_bytes += len(data)
            self._all_bytes += len(data)

    def _find(self, scope: str, key: SampleKey, oldest: int) -> RecordedEpisode | None:
        paths = [path for path in self.path.parent.glob(f"*{SUFFIX}") if path != self.path]
        self._others = {path: self._others.get(path) or JournalReader(path) for path in paths}
        for reader in self._others.values():
            reader.refresh()
        others = [reader.entries.get((scope, key), []) for reader in self._others.values()]
        return episode(longest([self._live.get((scope, key), []), *others], oldest))

    def _forget(self, needed: Callable[[str, Sequence[Entry]], bool]) -> None:
        for each in list(self._live):
            if not needed(each[0], self._live[each]):
                self._live_bytes -= sum(entry.size for entry in self._live.pop(each))
        forgotten = self._all_bytes - FILE_HEAD_BYTES - self._live_bytes
        if self._file >= 0 and forgotten > (max(self._live_bytes, KEPT_BYTES) if self._live else 0):
            self._rewrite()

    def _rewrite(self) -> None:
        """Put a file with what is not forgotten in place of this one."""
        self._close()
        if self._live:
            self._file = write_frames(self.path, (entry.read() for each in self._live.values() for entry in each))
        else:
            self.path.unlink(missing_ok=True)
        self._all_bytes = FILE_HEAD_BYTES
        for records in self._live.values():
            for i, entry in enumerate(records):
                records[i] = replace(entry, offset=self._all_bytes)
                self._all_bytes += entry.size


def write_frames(path: Path, encoded: Iterable[bytes]) -> int:
    """Write a file as a whole, in place of what it was; returns its descriptor, for appending."""
    unfinished = path.with_suffix(".new")
    unfinished.unlink(missing_ok=True)
    file = os.open(unfinished, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        _write(file, FORMAT + secrets.token_bytes(FILE_HEAD_BYTES - len(FORMAT)))
        for data in encoded:
            _write(file, data)
        unfinished.rename(path)
    except BaseException:
        os.close(file)
        unfinished.unlink(missing_ok=True)
        raise
    return file


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data):]


class Needed(NamedTuple):
    """Which episodes are needed still, of those that an episode runner has recorded."""

    version: int
    """Of the present policy."""
    committed: int
    """Of the policy in the newest checkpoint."""
    max_staleness: int
    evaluation: str = ""
    """Scope of the evaluation under way; "" for none."""

    def of(self, scope: str, records: Sequence[Entry]) -> bool:
        """Whether an episode is open, or would be taken over by a run that continues from the checkpoint."""
        if scope != TRAINING:
            return scope == self.evaluation
        last = last_attempt(records)
        if not last:
            return False
        began = last[0].version
        again = self.committed - self.max_staleness <= began <= self.committed
        return again or began >= self.version - self.max_staleness
