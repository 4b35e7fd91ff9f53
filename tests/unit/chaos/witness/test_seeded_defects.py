"""The seeded defects of the slow tests still fit the sources."""

import ast
from pathlib import Path

import pytest

from tests.cluster.seeded_defects import DEFECTS, ROOT, Edit


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_applies_to_the_sources(defect, tmp_path):
    for edit in DEFECTS[defect]:
        copy = tmp_path / edit.path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((ROOT / edit.path).read_text())
        edit.apply(tmp_path)
        assert edit.new in copy.read_text() and ast.parse(copy.read_text())


def test_an_edit_of_other_sources_is_refused(tmp_path):
    Path(tmp_path / "x.py").write_text("a = 1\n")
    with pytest.raises(ValueError, match="0 times: b = 1"):
        Edit("x.py", "b = 1", "b = 2").apply(tmp_path)
