"""The table on disk: what is written comes back, by number, without staying in memory."""

import os
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from rlhf_ray.config.data import PromptsConfig
from rlhf_ray.data.prompt_table import PromptTable, open_prompts, write_blocks
from rlhf_ray.data.row_readers import BLOCK
from rlhf_ray.errors import DataError
from rlhf_ray.records import Prompts, offsets_of


def block(first: int, count: int) -> Prompts:
    """Row n has n % 5 + 1 tokens, all n."""
    rows = np.arange(first, first + count)
    lengths = rows % 5 + 1
    return Prompts(offsets_of(lengths), np.repeat(rows, lengths).astype(np.int32), [f"text {n}" for n in rows],
                   [{"n": int(n)} for n in rows], rows)


def table_of(path: Path, *blocks: Prompts) -> PromptTable:
    with path.open("w+b") as file:
        write_blocks(file, blocks)
        return PromptTable(file)


def test_rows_come_back_by_number_in_the_order_asked_across_uneven_blocks(tmp_path: Path):
    table = table_of(tmp_path / "t", block(0, 3), block(3, 0), block(3, 7), block(10, 1))
    assert len(table) == 11
    found = table.rows([10, 2, 3, 9, 0])
    assert found.rows.tolist() == [10, 2, 3, 9, 0]
    assert found.texts == ["text 10", "text 2", "text 3", "text 9", "text 0"]
    assert found.metadata == [{"n": n} for n in (10, 2, 3, 9, 0)]
    assert [found.row(i, "tokens").tolist() for i in range(5)] == [[10], [2] * 3, [3] * 4, [9] * 5, [0]]
    assert (found.tokens.dtype, found.rows.dtype) == (np.int32, np.int64)


@pytest.mark.parametrize("number", [-1, 4])
def test_a_number_that_the_table_lacks_is_an_error(tmp_path: Path, number: int):
    with pytest.raises(DataError, match=f"no prompt {number}: the table has rows 0 to 3"):
        table_of(tmp_path / "t", block(0, 4)).rows([0, number])


def test_metadata_that_json_has_no_words_for_becomes_text_and_bytes_vanish(tmp_path: Path):
    odd = Prompts(offsets_of([1]), np.array([1], np.int32), ["x"],
                  [{"day": date(2020, 2, 3), "picture": {"bytes": b"\x00"}, "answer": [1, 2.5, None, "é"]}],
                  np.arange(1))
    assert table_of(tmp_path / "t", odd).rows([0]).metadata == [
        {"day": "2020-02-03", "picture": {"bytes": None}, "answer": [1, 2.5, None, "é"]}]


def test_a_chunk_of_texts_and_messages_keeps_the_messages_of_each_row(tmp_path: Path):
    chat = [{"role": "user", "content": "hi", "sent": date(2020, 2, 3)}]
    chats = Prompts(offsets_of([1]), np.array([1], np.int32), ["<hi>"], [{}], np.arange(1), [chat])
    table = table_of(tmp_path / "t", block(0, 2), chats)
    kept = [{**chat[0], "sent": "2020-02-03"}]
    assert table.rows([2]).messages == [kept]
    assert table.rows([1, 2, 0]).messages == [None, kept, None]
    assert table.rows([1, 0]).messages is None


def test_a_data_set_of_several_blocks_is_numbered_through_and_leaves_no_file(tmp_path: Path, write_jsonl, tokenizer):
    count = 2 * BLOCK + 5
    path = write_jsonl(*({"prompt": "We" if n % 2 else "We saw the film and", "n": n} for n in range(count)))
    before = os.listdir(tmp_path)
    found = open_prompts(PromptsConfig(path=path, max_tokens=2), tokenizer, tmp_path)
    table, report = found.training, found.reports[0]
    assert (len(table), report.rows, report.left_out["longer than max_tokens=2"].count) == (count // 2, count, 1003)
    assert [row["n"] for row in table.rows([0, 499, 500, 999, 1001]).metadata] == [1, 999, 1001, 1999, 2003]
    assert os.listdir(tmp_path) == before


def test_memory_is_given_back_after_each_answer(tmp_path: Path):
    table = table_of(tmp_path / "t", *(block(first, 1000) for first in range(0, 100_000, 1000)))
    resident = [_resident(tmp_path / "t")]
    table.rows(range(0, 100_000, 10))
    resident.append(_resident(tmp_path / "t"))
    assert max(resident) < table.nbytes / 4, f"{resident} of {table.nbytes} bytes are in memory"


def _resident(path: Path) -> int:
    """Bytes of a mapped file that are in this process's memory."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found
