"""Where chunks get their prompts: rows asked for by number, answered by the prompt reader into the object store."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rlhf_ray.cluster.calls import Call
from rlhf_ray.cluster.group import WorkerGroup
from rlhf_ray.config.data import PromptsConfig
from rlhf_ray.records import SampleKey
from rlhf_ray.roles.prompt_reader import HELD_OUT


@dataclass(frozen=True)
class PromptSource:
    """One table of the prompt reader."""

    reader: WorkerGroup
    table: str
    sizes: list[int]
    """Rows of each of its data sets, numbered through from 0."""
    reports: list[str]
    """What was left out of each."""
    held_out: "PromptSource | None" = None
    """The rows that were kept out of this table, if any."""

    @property
    def rows(self) -> int:
        """All its rows."""
        return sum(self.sizes)

    @classmethod
    async def open(cls, reader: WorkerGroup, table: str, config: PromptsConfig) -> "PromptSource":
        """Let the reader tokenise the data of a section.

        Raises:
            DataError, ModelError: it cannot be read; see `data.prompt_table.open_prompts`.
        """
        found = await reader.call(0, "open", table, config).value()
        held_out = cls(reader, HELD_OUT, [found["held_out"]], []) if found["held_out"] else None
        return cls(reader, table, found["sizes"], found["reports"], held_out)

    def first_held_out(self, limit: int | None) -> "PromptSource | None":
        """The rows kept out of this table, or the first `limit` of them."""
        if self.held_out is None:
            return None
        return replace(self.held_out, sizes=[min(self.held_out.rows, limit or self.held_out.rows)])

    async def of(self, keys: Iterable[SampleKey]) -> Call:
        """The prompts of a chunk, each row once; the call has ended, its `ref` is for the chunk's roles."""
        numbers = list(dict.fromkeys(key.row for key in keys))
        call = self.reader.call(0, "rows", numbers, self.table)
        await call.done()
        return call
