"""The witness shares no code with what it attests: only its learners, which run inside the system, import it."""

import ast
from pathlib import Path

import pytest

from chaos.witness.journals import Journal, read_journal

WITNESS = Path(__file__).parents[4] / "chaos/witness"


def packages(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in [*names, *([node.module or ""] if isinstance(node, ast.ImportFrom) else [])]:
            yield name.split(".")[0], name


@pytest.mark.parametrize("path", sorted(WITNESS.glob("*.py")), ids=lambda path: path.stem)
def test_only_the_learners_import_the_system(path):
    imported = set(packages(path))
    assert any(package == "rlhf_ray" for package, _ in imported) is (path.stem == "learners")
    assert {name for package, name in imported if package == "chaos" and not name.startswith("chaos.witness")} == set()


def test_a_line_that_a_killed_process_left_unfinished_is_skipped(tmp_path):
    first = Journal(tmp_path, "x")
    first.add("start")
    (tmp_path / "x.jsonl").open("a").write('{"event": "fe')
    assert [line["event"] for line in read_journal(tmp_path, "x")] == ["start"] and read_journal(tmp_path, "y") == []
