"""The table of docs/models.md, without the checks that it shows (tests/slow/test_model_table.py makes them)."""

from pathlib import Path

from tests.model_table import BEGIN, COLUMNS, END, FAMILIES, read_table, table_of

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
FOUND = {"llama": ("works",) * 5, "qwen2": ("works",) * 5,
         "bloom": ("works", "refused: its own way", "works", "fails", "-"),
         "mpt": ("refused: other", "refused: its own way", "works", "fails", "-")}


def test_the_page_has_every_family_with_a_tiny_model():
    assert read_table(PAGE.read_text()).keys() == set(FAMILIES)


def test_a_table_is_read_as_it_was_written():
    table = table_of(FOUND)
    assert read_table(f"{BEGIN}\n{table}\n{END}") == FOUND
    assert "| `llama`, `qwen2` | works | works | works | works | works |" in table
    assert "| `bloom` | works | refused (1) | works | fails | - |" in table and "1. its own way" in table
    assert all(len(cells) == len(COLUMNS) for cells in read_table(PAGE.read_text()).values())
