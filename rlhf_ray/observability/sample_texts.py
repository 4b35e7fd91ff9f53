"""Rollouts as text in parquet files: `samples/step_000012.parquet`, and one file for every ROLLED steps that are over.

A file of several steps, `steps_000001-000256.parquet`, takes the place of theirs: a million steps leave four thousand
files. It is complete before the others are removed, so of a step that is in both, the single file is void.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_ray.files.writing import write_atomically
from rlhf_ray.observability.owner_record import Term

COLUMNS = ("step", "prompt", "response", "score", "kl", "gold")
ROLLED = 256
"""Steps of a file: those after a multiple of this number up to the next multiple."""
_NAME = re.compile(r"steps?_(\d+)(?:-(\d+))?\.parquet")


class Part(NamedTuple):
    """A file with the rollouts of the steps `first` to `last`."""

    first: int
    last: int
    path: Path


class SampleWriter:
    """Writes the rollouts of each step."""

    def __init__(self, directory: Path, resume_at: int | None = None, term: Term | None = None) -> None:
        """On resume at step k the rollouts of later steps are removed: those steps will be made again."""
        self.directory, self._term = directory, term
        directory.mkdir(parents=True, exist_ok=True)
        parts = sample_parts(directory)
        self._remove(set(_all_parts(directory)) - set(parts))
        self._rolled = 0
        """Steps up to this one are known to be rolled, where they have files."""
        if resume_at is not None:
            for part in parts:
                if part.first <= resume_at < part.last:
                    self._split(part, resume_at)
                elif part.first > resume_at:
                    self._remove([part])

    def write(self, step: int, samples: Sequence[dict[str, Any]]) -> Path | None:
        """Write one step's rows. Keys are COLUMNS, null when missing, and any numeric ones besides (the components of
        the score, `reward/NAME`). None when there are no rows."""
        if not samples:
            return None
        import pyarrow as pa

        if self._rolled < (over := (step - 1) // ROLLED * ROLLED):
            self._roll(over)
            self._rolled = over

        more = [name for name in samples[0] if name not in COLUMNS]
        kinds = {"step": pa.int64(), "prompt": pa.string(), "response": pa.string()}
        schema = pa.schema([(name, kinds.get(name, pa.float32())) for name in (*COLUMNS, *more)])
        rows = [{**sample, "step": step} for sample in samples]
        return self._write(f"step_{step:06d}", pa.Table.from_pylist(rows, schema=schema))

    def _roll(self, last: int) -> None:
        """Roll the files of single steps up to `last`."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        blocks: dict[int, list[Part]] = defaultdict(list)
        for part in sample_parts(self.directory):
            if part.first == part.last <= last:
                blocks[_block(part)].append(part)
        for block, parts in blocks.items():
            tables = [pq.read_table(part.path) for part in parts]
            self._write(f"steps_{block * ROLLED + 1:06d}-{(block + 1) * ROLLED:06d}",
                        pa.concat_tables(tables, promote_options="default"))
            self._remove(parts)

    def _split(self, part: Part, last: int) -> None:
        """Put the steps of a file up to `last` into files of their own again."""
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        table = pq.read_table(part.path)
        for step in range(part.first, last + 1):
            rows = table.filter(pc.equal(table["step"], step))
            if len(rows):
                self._write(f"step_{step:06d}", rows)
        self._remove([part])

    def _write(self, name: str, table: Any) -> Path:
        import pyarrow as pa
        import pyarrow.parquet as pq

        buffer, target = pa.BufferOutputStream(), self.directory / f"{name}.parquet"
        pq.write_table(table, buffer)
        write_atomically(target, buffer.getvalue().to_pybytes(), self._term)
        return target

    def _remove(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if self._term is not None:
                self._term.check()
            part.path.unlink()


def sample_parts(directory: Path) -> list[Part]:
    """The files of a samples/ folder by step, each step in one of them."""
    found = _all_parts(directory)
    rolled = {_block(part) for part in found if part.last > part.first}
    return sorted(part for part in found if part.last > part.first or _block(part) not in rolled)


def some_rollouts(directory: Path, per_step: int = 3) -> list[dict[str, Any]]:
    """Rows of the first, the middle and the last step of a samples/ folder, which a run may be writing."""
    while True:
        with suppress(FileNotFoundError):  # the run has just rolled the files of these steps
            return _some_rollouts(directory, per_step)


def _some_rollouts(directory: Path, per_step: int) -> list[dict[str, Any]]:
    parts = sample_parts(directory)
    if not parts:
        return []
    import pyarrow.parquet as pq

    rows: dict[int, list[dict[str, Any]]] = {}
    for part, place in ((parts[0], 0.0), (parts[len(parts) // 2], 0.5), (parts[-1], 1.0)):
        table = pq.read_table(part.path).to_pylist()
        steps = sorted({row["step"] for row in table})
        step = steps[round(place * (len(steps) - 1))]
        rows[step] = [row for row in table if row["step"] == step][:per_step]
    return [row for step in sorted(rows) for row in rows[step]]


def _all_parts(directory: Path) -> list[Part]:
    matches = ((path, _NAME.fullmatch(path.name)) for path in directory.glob("step*.parquet"))
    return [Part(int(match[1]), int(match[2] or match[1]), path) for path, match in matches if match]


def _block(part: Part) -> int:
    return (part.first - 1) // ROLLED
