"""Tokenised prompts on disk, read through a memory map: a million prompts take no more memory than a chunk.

The table is an Arrow file without a name: written once to a temporary file that is unlinked at once, so that it is gone
with the process that holds it, however that ends. What was read is given back to the page cache after each answer.
"""

from __future__ import annotations

import errno
import json
import mmap
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.config.data import PromptsConfig
from rlhf_ray.data.chat import identity
from rlhf_ray.data.encoding import flat_tokens
from rlhf_ray.data.held_out import group_digest, held_out_parts
from rlhf_ray.data.load_report import LoadReport
from rlhf_ray.data.prompts import RowCheck, stream_prompts
from rlhf_ray.errors import DataError
from rlhf_ray.records import Prompts, offsets_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptTable:
    """Rows by number, read on demand."""

    def __init__(self, file: BinaryIO) -> None:
        """
        Args:
            file: an Arrow file as `write_blocks` leaves it; may be closed afterwards.
        """
        import pyarrow as pa

        self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self._blocks = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(self._map)))
        counts = [self._blocks.get_batch(i).num_rows for i in range(self._blocks.num_record_batches)]
        self._starts = offsets_of(counts)
        self._release_pages()

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def nbytes(self) -> int:
        """Size on disk."""
        return len(self._map)

    def rows(self, numbers: Sequence[int]) -> Prompts:
        """The rows of these numbers, in this order (copies).

        Raises:
            DataError: no such row.
        """
        found = [self._row(number) for number in numbers]
        self._release_pages()
        tokens = [row["tokens"] for row in found]
        chats = [None if row["messages"] is None else json.loads(row["messages"]) for row in found]
        return Prompts(
            offsets=offsets_of([len(t) for t in tokens]), tokens=flat_tokens(tokens),
            texts=[row["text"] for row in found], metadata=[json.loads(row["metadata"]) for row in found],
            rows=np.array(numbers, dtype=np.int64), messages=chats if any(chats) else None)

    def _release_pages(self) -> None:
        """Remove the pages that were read from the process; they stay in the page cache while memory is free."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def _row(self, number: int) -> dict[str, Any]:
        if not 0 <= number < len(self):
            raise DataError(f"no prompt {number}: the table has rows 0 to {len(self) - 1}")
        block = int(np.searchsorted(self._starts, number, side="right")) - 1
        batch, i = self._blocks.get_batch(block), number - int(self._starts[block])
        return {name: column[i].as_py() for name, column in zip(batch.schema.names, batch.columns, strict=True)}


@dataclass(frozen=True)
class PromptRows:
    """A subset of a table's rows with their own numbers: the training rows, or the held-out ones."""

    table: PromptTable
    index: NDArray[np.int64] | None
    """[N] the row of the table that each is; None when it is the row of that number."""
    sizes: list[int]
    """How many come from each data set, one data set after another."""

    def __len__(self) -> int:
        return sum(self.sizes)

    def rows(self, numbers: Sequence[int]) -> Prompts:
        """The rows of these numbers, in this order.

        Raises:
            DataError: no such row.
        """
        if self.index is None:
            return self.table.rows(numbers)
        if wrong := [number for number in numbers if not 0 <= number < len(self)]:
            raise DataError(f"no prompt {wrong[0]}: there are rows 0 to {len(self) - 1}")
        found = self.table.rows(self.index[np.array(numbers, dtype=np.int64)].tolist())
        return replace(found, rows=np.array(numbers, dtype=np.int64))


@dataclass(frozen=True)
class OpenPrompts:
    """A data section's prompts."""

    training: PromptRows
    held_out: PromptRows
    reports: list[LoadReport]
    """Report of each data set."""


def open_prompts(config: PromptsConfig, tokenizer: PreTrainedTokenizerBase, directory: Path | None = None,
                 checks: Sequence[RowCheck] = ()) -> OpenPrompts:
    """Tokenise the data sets of a section into one table, block by block.

    Args:
        directory: where the table's bytes lie, for as long as it is open; the system's place for temporary files when
            None (which on some machines is memory).
        checks: of every row.

    Raises:
        DataError: a file or rows that cannot be used (named), no prompt left, or the disk is full.
        ModelError: chat messages that the tokenizer has no template for.
    """
    reports = [LoadReport(part.location) for part in config.parts()]
    digests = array("Q")
    with tempfile.TemporaryFile(dir=directory) as file:
        try:
            write_blocks(file, _blocks(config, tokenizer, reports, digests, checks))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DataError(f"{config.title}: the table of tokenised prompts does not fit on the disk of "
                            f"{directory or tempfile.gettempdir()}; free some space on it") from error
        table = PromptTable(file)
    training, held_out = _split(table, [report.kept for report in reports], np.frombuffer(digests, np.uint64), config)
    for report, count in zip(reports, held_out.sizes, strict=True):
        report.held_out = count
    return OpenPrompts(training, held_out, reports)


def _blocks(config: PromptsConfig, tokenizer: PreTrainedTokenizerBase, reports: list[LoadReport],
            digests: array[int], checks: Sequence[RowCheck]) -> Iterator[Prompts]:
    """The blocks of all data sets; `digests` receives those of the prompts, if some will be held out."""
    for part, report in zip(config.parts(), reports, strict=True):
        for block in stream_prompts(part, tokenizer, report, checks=checks):
            if config.held_out:
                chats = block.messages or [None] * len(block)
                names = ([str(row["index"]) for row in block.metadata] if part.numbers else
                         [identity(text, messages, part.system)
                          for text, messages in zip(block.texts, chats, strict=True)])
                digests.extend(map(group_digest, names))
            yield block


def _split(table: PromptTable, sizes: list[int], digests: NDArray[np.uint64],
           config: PromptsConfig) -> tuple[PromptRows, PromptRows]:
    if not config.held_out:
        return PromptRows(table, None, sizes), PromptRows(table, np.empty(0, np.int64), [0] * len(sizes))
    parts = held_out_parts(np.split(digests, np.cumsum(sizes)[:-1]), config)
    held, counts = np.concatenate(parts), [int(part.sum()) for part in parts]
    return (PromptRows(table, np.flatnonzero(~held), [len(part) - n for part, n in zip(parts, counts, strict=True)]),
            PromptRows(table, np.flatnonzero(held), counts))


def write_blocks(file: BinaryIO, blocks: Iterable[Prompts]) -> None:
    """Write prompts as an Arrow file, a record batch a block.

    Metadata is kept as JSON, since rows may differ in their columns and types: what JSON has no words for (dates,
    decimals) becomes text, bytes (pictures, say) become null.
    """
    import pyarrow as pa

    texts = ("text", "metadata", "messages")
    schema = pa.schema([("tokens", pa.list_(pa.int32())), *((name, pa.string()) for name in texts)])
    with pa.ipc.new_file(file, schema) as writer:
        for block in blocks:
            tokens = pa.ListArray.from_arrays(pa.array(block.offsets.astype(np.int32)), pa.array(block.tokens))
            metadata = [json.dumps(row, default=_plain) for row in block.metadata]
            chats = [chat and json.dumps(chat, default=_plain) for chat in block.messages or [None] * len(block)]
            columns = (pa.array(values, pa.string()) for values in (block.texts, metadata, chats))
            writer.write_batch(pa.record_batch([tokens, *columns], schema=schema))
    file.flush()


def _plain(value: Any) -> str | None:
    return None if isinstance(value, (bytes, bytearray, memoryview)) else str(value)
