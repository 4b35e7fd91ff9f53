"""docs/models.md says what `check-model` finds with each family."""

from pathlib import Path

import pytest

from tests.model_table import FAMILIES, cells_of, read_table

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_says_what_works(family):
    assert read_table(PAGE.read_text())[family] == cells_of(family)
