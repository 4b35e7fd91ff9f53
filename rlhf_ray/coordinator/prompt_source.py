"""Where chunks get their prompts: rows asked for by number, answered by the prompt reader into the object store."""

from collections.abc import Iterable
from dataclasses import dataclass

from rlhf_ray.cluster.calls import Call
from rlhf_ray.cluster.group import WorkerGroup
from rlhf_ray.config.data import PromptsConfig
from rlhf_ray.records import SampleKey


@dataclass(frozen=True)
class PromptSource:
    """One table of the prompt reader."""

    reader: WorkerGroup
    table: str
    rows: int
    """Rows it has, numbered from 0."""
    report: str
    """What was left out of it."""

    @classmethod
    async def open(cls, reader: WorkerGroup, table: str, config: PromptsConfig) -> "PromptSource":
        """Let the reader tokenise a data set.

        Raises:
            DataError, ModelError: it cannot be read; see `data.prompt_table.open_prompts`.
        """
        rows, report = await reader.call(0, "open", table, config).value()
        return cls(reader, table, rows, report)

    async def of(self, keys: Iterable[SampleKey]) -> Call:
        """The prompts of a chunk, each row once; the call has ended, its `ref` is for the chunk's roles."""
        numbers = list(dict.fromkeys(key.row for key in keys))
        call = self.reader.call(0, "rows", numbers, self.table)
        await call.done()
        return call
