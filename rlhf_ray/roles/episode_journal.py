"""Journals of episodes: what is needed to go on with an episode whose runner or driver was lost.

Each process of an episode runner appends to a file of its own: how an episode begins, each of its turns before the next
one is sampled, and how it ends. A successor reads the file and never writes to it. A journal is no truth: an episode
without one begins again, and gives the same samples wherever its environment can be replayed. So its errors end no
run, and it is written without fsync: it survives processes, not machines.

    frame: crc32, length of the JSON, length of the arrays (4 bytes each) | JSON | arrays
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlhf_ray.errors import DiskStalled, first_line
from rlhf_ray.files.writer_thread import FileThread
from rlhf_ray.records import SampleKey
from rlhf_ray.roles.engines.interface import Completion

SUFFIX = ".journal"
HEAD = struct.Struct("<III")
LARGEST = 1 << 30
"""Bytes of a part of a frame at most; a larger number is damage."""
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
    """"start", "turn" or "outcome"."""
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
    def decoded(cls, text: bytes, body: bytes) -> Frame:
        """The inverse of `encoded`."""
        kind, scope, key, newest, facts, layout = json.loads(text)
        arrays, at = {}, 0
        for name, dtype, count in layout:
            arrays[name] = np.frombuffer(body, dtype, count, at)
            at += arrays[name].nbytes
        return cls(kind, scope, SampleKey(*key), newest, facts, arrays)


@dataclass(frozen=True)
class RecordedTurn:
    """One turn of an episode, as it was."""

    context: str
    """`digest` of the tokens of its segment before it."""
    completion: Completion
    answer: dict[str, Any] | None
    """The fields of the environment's `Step`; None where it was not asked."""
    snapshot: Any = None
    """Of the environment after its answer, if it gives any."""
    age_s: float = 0.0
    """Seconds that the episode had been played for, in all processes."""

    def frame(self, scope: str, key: SampleKey) -> Frame:
        """As a record."""
        whole = self.completion
        arrays: dict[str, Any] = {"tokens": whole.tokens, "logprobs": whole.logprobs, "versions": whole.versions}
        if whole.masks:
            arrays["mask_sizes"] = np.array([len(each) for each in whole.masks], dtype=np.int32)
            arrays["mask_tokens"] = np.concatenate(whole.masks)
        facts = {"context": self.context, "finish_reason": whole.finish_reason, "answer": self.answer,
                 "snapshot": self.snapshot, "age_s": self.age_s}
        return Frame("turn", scope, key, int(whole.versions.max(initial=-1)), facts, arrays)

    @classmethod
    def of(cls, frame: Frame) -> RecordedTurn:
        """The inverse of `frame`."""
        arrays, facts = frame.arrays, frame.facts
        masks: tuple[Any, ...] = ()
        if "mask_sizes" in arrays:
            masks = tuple(np.split(arrays["mask_tokens"], np.cumsum(arrays["mask_sizes"])[:-1]))
        completion = Completion(arrays["tokens"], arrays["logprobs"], arrays["versions"], facts["finish_reason"], masks)
        return cls(facts["context"], completion, facts["answer"], facts["snapshot"], facts["age_s"])


@dataclass
class RecordedEpisode:
    """What a journal knows of an episode: its last attempt."""

    start: dict[str, Any]
    """"start": the environment's answer to reset, "attempt": number of the attempt, "events": of those before, "age_s":
    seconds that they took, "version": of the policy when it began."""
    turns: list[RecordedTurn] = field(default_factory=list)
    outcome: dict[str, Any] | None = None
    """How it ended; None for an episode under way."""

    @property
    def age_s(self) -> float:
        """Seconds that it had been played for when it was recorded last."""
        return float(self.turns[-1].age_s if self.turns else self.start["age_s"])


def digest(tokens: Sequence[int]) -> str:
    """Of a segment's tokens."""
    return hashlib.blake2b(np.asarray(tokens, dtype=np.int32).tobytes(), digest_size=12).hexdigest()


class Entry(NamedTuple):
    """Where a record is."""

    kind: str
    newest: int
    attempt: int
    """Number of a "start"; else 0."""
    version: int
    """Of the policy at a "start"; else 0."""
    path: Path
    place: int
    """Of its frame in the file, in bytes."""
    size: int

    @classmethod
    def of(cls, frame: Frame, path: Path, place: int, size: int) -> Entry:
        """Of a frame at a place of a file."""
        facts = frame.facts if frame.kind == "start" else {}
        return cls(frame.kind, frame.newest, facts.get("attempt", 0), facts.get("version", 0), path, place, size)

    def read(self) -> bytes:
        """The frame."""
        with self.path.open("rb") as file:
            file.seek(self.place)
            return file.read(self.size)


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

    def refresh(self) -> None:
        """Read what was appended since the last time. A file that is gone has no more."""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._read)
            while (whole := _next_frame(file)) is not None:
                frame, size = whole
                entry = Entry.of(frame, self.path, self._read, size)
                self.entries.setdefault((frame.scope, frame.key), []).append(entry)
                self._read += size


def _next_frame(file: Any) -> tuple[Frame, int] | None:
    """The next frame of a file and its size; None if it is not whole."""
    head = file.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    crc, text, arrays = HEAD.unpack(head)
    if max(text, arrays) > LARGEST:
        return None
    body = file.read(text + arrays)
    if len(body) < text + arrays or zlib.crc32(body) != crc:
        return None
    return Frame.decoded(body[:text], body[text:]), HEAD.size + len(body)


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
    try:
        for entry in entries:
            whole = _next_frame(io.BytesIO(entry.read()))
            if whole is None:
                return found
            frame, _ = whole
            if frame.kind == "start":
                found = RecordedEpisode(frame.facts)
            elif found is not None and frame.kind == "turn":
                found.turns.append(RecordedTurn.of(frame))
            elif found is not None:
                found.outcome = frame.facts
    except OSError:
        pass
    return found


class JournalWriter:
    """The journal of this process: a file, and the thread that writes it. Used from one event loop.

    Example:
        writer = JournalWriter(Path("episodes/1f/episode_runner-0-9c.journal"), warn)
        await writer.append(turn.frame("training", key))
        await writer.forget(lambda scope, records: scope == "training")
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        """`warn` is told, once, that the file cannot be written; nothing is recorded from then on."""
        self.path = path
        self.off = False
        """Nothing is recorded any more."""
        self._warn = warn
        self._thread = FileThread("episode journal", PATIENCE_S)
        # Of the thread:
        self._file = -1
        self._live: dict[tuple[str, SampleKey], list[Entry]] = {}
        self._live_bytes = self._all_bytes = 0

    async def append(self, frame: Frame) -> None:
        """Record, and wait until the file has it."""
        await self._run(self._append, frame)

    async def forget(self, needed: Callable[[str, Sequence[Entry]], bool]) -> None:
        """Forget episodes.

        Args:
            needed: whether an episode is needed still, by its scope and its records.
        """
        await self._run(self._forget, needed)

    def close(self) -> None:
        """Let the thread end once its work is done."""
        self._thread.submit(self._close)
        self._thread.close()

    async def _run(self, job: Callable[..., None], *args: Any) -> None:
        if self.off:
            return
        try:
            await self._thread.run(job, *args)
        except (OSError, DiskStalled) as error:
            if not self.off:
                self.off = True
                self._warn(f"the journal of episodes {self.path} cannot be written: {first_line(error)}. From now on "
                           "episodes begin again if their runner is lost")
                self.close()

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _append(self, frame: Frame) -> None:
        data = frame.encoded()
        if self._file < 0:
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        _write(self._file, data)
        entry = Entry.of(frame, self.path, self._all_bytes, len(data))
        self._live.setdefault((frame.scope, frame.key), []).append(entry)
        self._live_bytes += len(data)
        self._all_bytes += len(data)

    def _forget(self, needed: Callable[[str, Sequence[Entry]], bool]) -> None:
        for each in list(self._live):
            if not needed(each[0], self._live[each]):
                self._live_bytes -= sum(entry.size for entry in self._live.pop(each))
        if self._all_bytes - self._live_bytes > (max(self._live_bytes, KEPT_BYTES) if self._live else 0):
            self._rewrite()

    def _rewrite(self) -> None:
        """Put a file with what is not forgotten in place of this one."""
        self._close()
        if self._live:
            self._file = write_frames(self.path, (entry.read() for each in self._live.values() for entry in each))
        else:
            self.path.unlink(missing_ok=True)
        self._all_bytes = 0
        for records in self._live.values():
            for i, entry in enumerate(records):
                records[i] = entry._replace(place=self._all_bytes)
                self._all_bytes += entry.size


def write_frames(path: Path, encoded: Iterable[bytes]) -> int:
    """Write a file as a whole, in place of what it was; returns its descriptor, for appending."""
    unfinished = path.with_suffix(".new")
    unfinished.unlink(missing_ok=True)
    file = os.open(unfinished, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for data in encoded:
            _write(file, data)
        unfinished.rename(path)
    except BaseException:
        os.close(file)
        raise
    return file


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data):]


class Adopted(NamedTuple):
    """What a run that continues takes over from journals."""

    episodes: int
    """That go on, or had ended."""
    turns: int
    """Of them."""
    discarded: int
    """Turns that are played again, because a newer policy sampled them than the one that the run continues with."""


def adopt(files: Iterable[Path], target: Path, version: int, oldest: int) -> Adopted:
    """Copy the episodes of training that a run goes on with into a new file.

    A turn is usable if the policy that the run continues with, or an earlier one, sampled it and all turns before it.

    Args:
        version: of that policy.
        oldest: see `JournalPlace`.
    """
    attempts: dict[SampleKey, list[list[Entry]]] = {}
    discarded = 0
    for path in files:
        reader = JournalReader(path)
        reader.refresh()
        for (scope, key), entries in reader.entries.items():
            if scope == TRAINING:
                last = last_attempt(entries)
                newer = next((i for i, entry in enumerate(last) if max(entry.newest, entry.version) > version),
                             len(last))
                discarded += sum(entry.kind == "turn" for entry in last[newer:])
                attempts.setdefault(key, []).append(last[:newer])
    chosen = [best for candidates in attempts.values() if (best := longest(candidates, oldest))]
    if chosen:
        os.close(write_frames(target, (entry.read() for entries in chosen for entry in entries)))
    return Adopted(len(chosen), sum(entry.kind == "turn" for entries in chosen for entry in entries), discarded)


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
        """Whether an episode is open, or would be played again by a run that continues from the checkpoint: of its
        tokens none is newer than that, and a step after it may train on them."""
        if scope != TRAINING:
            return scope == self.evaluation
        last = last_attempt(records)
        if not last:
            return False
        began = last[0].version
        again = began >= self.committed - self.max_staleness and all(e.newest <= self.committed for e in last)
        return again or began >= self.version - self.max_staleness
