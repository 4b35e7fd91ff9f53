"""Buckets in memory that vLLM's own processes map, which Ray's object store is not.

The memory is kept from one publication to the next: to get pages from the kernel takes longer than to copy into them. A
process that still maps an old bucket would see the bytes of a new one, so a file is used again only after every process
said that it does not map it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.records import TensorEntry
from rlhf_ray.weights.manifest import in_parallel

ALIGNMENT = 64
"""Bytes. Every tensor in a file starts at a multiple of it, which suits every dtype and is one cache line."""
PIECE = 16 << 20
"""Bytes that a thread copies at a time."""
NAME = "rlhf-ray-weights"
LARGER = 2
"""A kept file is used for a bucket of its own size, or of down to this fraction of it."""


class SharedFile:
    """Anonymous shared memory that processes on this node map by `path`.

    It belongs to this process only: it is freed with this object or when the process ends for any reason, and when no
    other process maps it any more.
    """

    def __init__(self, nbytes: int) -> None:
        self._descriptor = os.memfd_create(NAME)
        self._file = os.fdopen(self._descriptor, "r+b", buffering=0)  # closes it with this object
        os.ftruncate(self._descriptor, nbytes)
        self.nbytes = nbytes
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.inode = os.fstat(self._descriptor).st_ino
        self._has_pages = False
        self._data: NDArray[np.uint8] | None = None

    def write(self, offsets: Sequence[int], pieces: Sequence[NDArray[np.uint8]]) -> None:
        """Write pieces at their offsets. New pages are filled by `pwrite`, which does not clear them first; later ones
        are mapped, because `pwrite` lets one thread at a time into a file."""
        if not self._has_pages:
            self._has_pages = True
            for offset, piece in zip(offsets, pieces, strict=True):
                done = 0
                while done < len(piece):
                    done += os.pwrite(self._descriptor, piece[done:].data, offset + done)
            return
        if self._data is None:
            memory = mmap.mmap(self._descriptor, self.nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            self._data = np.frombuffer(memory, dtype=np.uint8)
        targets = [self._data[offset : offset + len(piece)] for offset, piece in zip(offsets, pieces, strict=True)]
        for _ in in_parallel(np.copyto, targets, pieces, nbytes=self.nbytes):
            pass


@dataclass(frozen=True)
class StagedFile:
    """A bucket and the file that it is in."""

    entries: list[TensorEntry]
    file: SharedFile


class StagedFiles:
    """One publication's buckets; a `receiver.Stage`.

    Args:
        kept: files of an earlier publication that no process maps, in the order of their buckets. This publication
            writes into them; those that do not fit its buckets are freed.
    """

    def __init__(self, kept: Iterable[SharedFile] = ()) -> None:
        self.buckets: list[StagedFile] = []
        self._kept = list(kept)

    def add(self, tensors: Iterable[tuple[TensorEntry, NDArray[np.uint8]]]) -> None:
        """Copy a bucket's tensors."""
        received = list(tensors)  # all are verified before a byte is written
        offsets: list[int] = []
        pieces: list[NDArray[np.uint8]] = []
        end = 0
        for entry, array in received:
            for start in range(0, entry.nbytes, PIECE):
                offsets.append(end + start)
                pieces.append(array[start : start + PIECE])
            end += aligned(entry.nbytes)
        file = self._file(end)
        file.write(offsets, pieces)
        self.buckets.append(StagedFile([entry for entry, _ in received], file))

    def unmapped(self, mapped: Collection[int]) -> list[SharedFile]:
        """The files of this publication's buckets that another one may write into.

        Args:
            mapped: inodes that `mapped_files` returned in all processes that may have mapped them, after this
                publication was applied.
        """
        return [bucket.file for bucket in self.buckets if bucket.file.inode not in mapped]

    def _file(self, nbytes: int) -> SharedFile:
        needed = max(1, nbytes)  # an empty file cannot be mapped
        file = self._kept.pop(0) if self._kept else None
        if file is not None and needed <= file.nbytes <= LARGER * needed:
            return file
        del file  # before its successor takes memory
        return SharedFile(needed)


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to `ALIGNMENT`: a tensor's size in a file with padding."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def read_file(path: str, entries: Sequence[TensorEntry]) -> Iterator[tuple[TensorEntry, NDArray[np.uint8]]]:
    """The tensors of a bucket in another process's file, as views of the mapped file."""
    data: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
    offset = 0
    for entry in entries:
        yield entry, data[offset : offset + entry.nbytes]
        offset += aligned(entry.nbytes)


def mapped_files() -> list[int]:
    """Inodes of buckets' files that this process maps, as long as an array or tensor of theirs exists."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    return sorted({int(line.split()[4]) for line in lines if f"/memfd:{NAME}" in line})
