"""The samples of every step in parquet files: `samples/step_000012.parquet`, and one for ROLLED steps that are over.

A sample is a row: its key, texts and rewards, and a list for each of its numbers per token; an episode has its turns,
too. `sample_table` gives the columns. An assembler writes the files; the driver cuts them where a run resumes.

A file of several steps, `steps_000001-000256.parquet`, takes the place of theirs if they are small together: a million
steps of a small run leave four thousand files. It is complete before the others are removed, so of a step that is in
both, the single file is void.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlhf_ray.files.writing import write_atomically
from rlhf_ray.observability.owner_record import Term
from rlhf_ray.records import Episode, Experience

if TYPE_CHECKING:
    import pyarrow as pa

ROLLED = 256
"""Steps of a file: those after a multiple of this number up to the next multiple."""
ROLLED_BYTES = 64 * 2**20
"""Steps whose files are larger together keep files of their own."""
PER_TOKEN = ("behaviour_logprobs", "old_logprobs", "reference_logprobs", "advantages")
"""Columns with a float32 for each token."""
SHOWN = ("step", "epoch", "row", "sample", "prompt", "messages", "response", "score", "kl", "gold")
"""Columns without lists that every file has."""
TEXTS = {"prompt", "response", "messages", "error", "turns.text", "turns.tool_calls", "turns.messages",
         "turns.opens"}
"""Columns that hardly repeat a value, so that a dictionary of their values does not pay."""
_NAME = re.compile(r"steps?_(\d+)(?:-(\d+))?\.parquet")


class Part(NamedTuple):
    """A file with the samples of the steps `first` to `last`."""

    first: int
    last: int
    path: Path


class SampleTexts(NamedTuple):
    """The texts of a step's samples."""

    prompts: Sequence[str]
    """[S] without special tokens."""
    messages: Sequence[str | None]
    """[S] the prompt's chat messages as JSON; None for a prompt that is a text."""
    responses: Sequence[str]
    """[S] without special tokens."""
    tokens: Mapping[int, str]
    """Every token id of the samples as text, alone."""
    turns: Sequence[Sequence[str]] = ()
    """[S] what the policy sampled in each turn of an episode, without special tokens; empty for single responses."""


def sample_table(
    step: int, experience: Experience, texts: SampleTexts, numbers: Mapping[str, np.ndarray | None],
    unknown: Collection[str] = (),
) -> pa.Table:
    """The table of a step's samples.

    Args:
        experience: of all samples, from a rollout; a sample's rows are adjacent.
        numbers: [S] float32 by column: score, its components (reward/NAME), kl, gold; None is null, as is NaN, the
            reward of an episode that has none.
        unknown: columns of `PER_TOKEN` that are null: `old_logprobs` if no learner computed them, `advantages` if
            nothing was learned.
    """
    import pyarrow as pa

    rows = experience.sample_rows
    first_rows = [each.start for each in rows] + [len(experience)]
    starts = pa.array(experience.offsets[first_rows], pa.int32())
    reasons = experience.finish_reasons or [""] * len(experience)

    def lists(values: Any) -> pa.ListArray:
        return pa.ListArray.from_arrays(starts, values)

    def numbers_of_tokens(name: str) -> Any:
        values = getattr(experience, name)
        if values is None or name in unknown:
            return pa.nulls(len(rows), pa.list_(pa.float32()))
        return lists(pa.array(values, pa.float32()))

    ids, places = np.unique(experience.tokens, return_inverse=True)
    # Several tokens may have one text. With a text twice in a dictionary, pyarrow's files end in memory of the process.
    pieces, which = np.unique(np.array([texts.tokens[int(i)] for i in ids], dtype=object), return_inverse=True)
    dictionary = pa.array(pieces, pa.string())
    messages = list(texts.messages)
    if experience.episodes is not None:
        messages = [json.dumps(episode.messages) if episode.messages else own
                    for episode, own in zip(experience.episodes, messages, strict=True)]
    columns = {
        "step": pa.array([step] * len(rows), pa.int64()),
        **{name: pa.array([getattr(key, name) for key in experience.keys], pa.int64())
           for name in ("epoch", "row", "sample")},
        "prompt": pa.array(texts.prompts, pa.string()),
        "messages": pa.array(messages, pa.string()),
        "response": pa.array(texts.responses, pa.string()),
        "finish_reason": pa.array([reasons[each[-1]] for each in rows], pa.string()),
        **{name: pa.nulls(len(rows), pa.float32()) if values is None else
           pa.array(values, pa.float32(), from_pandas=experience.episodes is not None)
           for name, values in numbers.items()},
        "row_lengths": pa.ListArray.from_arrays(pa.array(first_rows, pa.int32()),
                                                pa.array(experience.lengths, pa.int32())),
        "token_ids": lists(pa.array(experience.tokens, pa.int32())),
        "token_texts": lists(pa.DictionaryArray.from_arrays(pa.array(which[places], pa.int32()), dictionary)),
        "response_mask": lists(pa.array(experience.response_mask, pa.bool_())),
        **{name: numbers_of_tokens(name) for name in PER_TOKEN},
        "versions": lists(pa.array(experience.versions, pa.int32())),
        **({} if experience.episodes is None else _columns_of(experience.episodes, texts.turns)),
    }
    return pa.table(columns)


def _columns_of(episodes: Sequence[Episode], texts: Sequence[Sequence[str]]) -> dict[str, pa.Array]:
    """The columns that only a file with episodes has. What has no fixed form is JSON: schemas of tools, tool calls and
    messages.

    Args:
        texts: [S] of each turn.
    """
    import pyarrow as pa

    turn = pa.struct({
        "segment": pa.int32(), "start": pa.int32(), "stop": pa.int32(), "seed": pa.int64(),
        "finish_reason": pa.string(), "reward": pa.float64(), "text": pa.string(), "tool_calls": pa.string(),
        "messages": pa.string(), "opens": pa.string()})
    turns = [[{"segment": each.row, "start": each.start, "stop": each.stop, "seed": each.seed,
               "finish_reason": each.finish_reason, "reward": each.reward, "text": text,
               "tool_calls": json.dumps(each.tool_calls), "messages": json.dumps(each.messages),
               "opens": json.dumps(each.opens)}
              for each, text in zip(episode.turns, its_texts, strict=True)]
             for episode, its_texts in zip(episodes, texts, strict=True)]
    names = ("environment", "cause", "use", "error")
    return {
        **{name: pa.array([getattr(episode, name) for episode in episodes], pa.string()) for name in names},
        "tools": pa.array([json.dumps(episode.tools) for episode in episodes], pa.string()),
        "metrics": pa.array([[*episode.metrics.items()] for episode in episodes],
                            pa.map_(pa.string(), pa.float64())),
        "events": pa.array([[*episode.events.items()] for episode in episodes], pa.map_(pa.string(), pa.int64())),
        "turns": pa.array(turns, pa.list_(turn)),
    }


class SampleWriter:
    """Writes the samples of each step. Has no state but its place, so any process may write the next step."""

    def __init__(self, directory: Path, term: Term | None = None) -> None:
        self.directory, self._term = directory, term

    def write(self, step: int, table: pa.Table) -> int:
        """Write the file of a step; returns its size in bytes.

        Raises:
            OSError: it cannot be written.
            SupersededError: another driver owns the directory now; nothing is written.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self._roll((step - 1) // ROLLED - 1)
        return self._write(f"step_{step:06d}", [table])

    def cut(self, last: int) -> None:
        """Remove the samples of steps after `last`, which will be made again, and files that are void.

        Raises: as `write`.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self.remove_void()
        for part in sample_parts(self.directory):
            if part.first <= last < part.last:
                self._split(part, last)
            elif part.first > last:
                self._remove([part])

    def remove_void(self) -> None:
        """Remove the files of single steps that a process left which ended while it rolled them."""
        self._remove(set(_all_parts(self.directory)) - set(sample_parts(self.directory)))

    def _roll(self, block: int) -> None:
        """Roll the files of the steps of one block, if they are small and not rolled yet."""
        import pyarrow.parquet as pq

        parts = [part for part in sample_parts(self.directory) if part.first == part.last and _block(part) == block]
        if parts and sum(part.path.stat().st_size for part in parts) <= ROLLED_BYTES:
            tables = (pq.read_table(part.path) for part in parts)
            self._write(f"steps_{block * ROLLED + 1:06d}-{(block + 1) * ROLLED:06d}", tables)
            self._remove(parts)

    def _split(self, part: Part, last: int) -> None:
        """Put the steps of a file up to `last` into files of their own again."""
        for step in range(part.first, last + 1):
            rows = _read(part.path, step)
            if len(rows):
                self._write(f"step_{step:06d}", [rows])
        self._remove([part])

    def _write(self, name: str, tables: Iterable[pa.Table]) -> int:
        """Write a file with a row group for each table."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        tables = list(tables)
        schema = pa.unify_schemas([table.schema for table in tables])
        buffer = pa.BufferOutputStream()
        paths = list(_paths(schema))
        floats = [path for path in paths if path.partition(".")[0] in PER_TOKEN]
        plain = [*floats, *(path for path in paths if path.replace(".list.element", "") in TEXTS)]
        with pq.ParquetWriter(buffer, schema, compression="zstd", use_byte_stream_split=floats,
                              use_dictionary=[path for path in paths if path not in plain]) as writer:
            for table in tables:
                columns = [table[field.name] if field.name in table.column_names else pa.nulls(len(table), field.type)
                           for field in schema]
                writer.write_table(pa.table(columns, schema=schema), row_group_size=max(1, len(table)))
        data = buffer.getvalue()
        write_atomically(self.directory / f"{name}.parquet", data.to_pybytes(), self._term)
        return int(data.size)

    def _remove(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if self._term is not None:
                self._term.check()
            part.path.unlink()


def _paths(schema: pa.Schema) -> Iterator[str]:
    """The paths of a schema's columns in a parquet file."""
    for field in schema:
        yield from _paths_below(field.name, field.type)


def _paths_below(path: str, kind: pa.DataType) -> Iterator[str]:
    import pyarrow.types as types

    if types.is_list(kind):
        yield from _paths_below(f"{path}.list.element", kind.value_type)
    elif types.is_struct(kind):
        for field in kind:
            yield from _paths_below(f"{path}.{field.name}", field.type)
    elif types.is_map(kind):
        yield from (f"{path}.key_value.key", f"{path}.key_value.value")
    else:
        yield path


def sample_parts(directory: Path) -> list[Part]:
    """The files of a samples/ folder by step, each step in one of them."""
    found = _all_parts(directory)
    rolled = {_block(part) for part in found if part.last > part.first}
    return sorted(part for part in found if part.last > part.first or _block(part) not in rolled)


def steps_with_samples(directory: Path) -> list[int]:
    """The steps of a samples/ folder, which a run may be writing, in order."""
    return _while_rolled(lambda: [step for part in sample_parts(directory) for step in _steps(part)])


def read_samples(directory: Path, step: int, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The samples of a step of a samples/ folder, which a run may be writing; none if it has none.

    Args:
        columns: None for all. Those that the file lacks are left out.
    """
    def rows() -> list[dict[str, Any]]:
        parts = [part for part in sample_parts(directory) if part.first <= step <= part.last]
        return [row for part in parts for row in _read(part.path, step, columns).to_pylist()]

    return _while_rolled(rows)


def some_samples(directory: Path, per_step: int = 3) -> list[dict[str, Any]]:
    """Samples of the first, the middle and the last step of a samples/ folder, which a run may be writing, without
    their tokens but with the turns of episodes; of different prompts, as far as there are any."""
    steps = steps_with_samples(directory)
    found: list[dict[str, Any]] = []
    for step in sorted({steps[0], steps[len(steps) // 2], steps[-1]} if steps else ()):
        rows = read_samples(directory, step, (*SHOWN, "cause", "turns"))
        found += sorted(rows, key=lambda row: row["sample"])[:per_step]
    return found


def _while_rolled(read: Any) -> Any:
    """The result of reading a folder, which is read again if a run has rolled its files meanwhile."""
    while True:
        with suppress(FileNotFoundError):
            return read()


def _steps(part: Part) -> list[int]:
    if part.first == part.last:
        return [part.first]
    import pyarrow.parquet as pq

    return sorted(set(pq.read_table(part.path, columns=["step"])["step"].to_pylist()))


def _read(path: Path, step: int, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of a step in a file."""
    import pyarrow.parquet as pq

    if columns is not None:
        names = set(pq.read_schema(path).names)
        columns = [name for name in columns if name in names]
    return pq.read_table(path, columns=columns, filters=[("step", "=", step)])


def _all_parts(directory: Path) -> list[Part]:
    matches = ((path, _NAME.fullmatch(path.name)) for path in directory.glob("step*.parquet"))
    return [Part(int(match[1]), int(match[2] or match[1]), path) for path, match in matches if match]


def _block(part: Part) -> int:
    return (part.first - 1) // ROLLED
