"""Methods that are called by name on workers exist. The fakes of other tests answer any name."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "rlhf_ray"
POSITION = {"call": (0, 1), "call_all": (0,), "values": (0,), "calls": (0,), "each": (0,), "call_and_get": (1,)}
"""Methods of groups and dispatchers, and where their arguments name the worker's method (a rank may come first)."""
ADDED = {"own_processes", "rendezvous"}
"""Methods that `cluster.actor_class` adds to every role."""


def trees(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    for folder in folders:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def test_every_called_method_is_one_of_a_role():
    defined = {node.name for _, tree in trees("roles") for node in ast.walk(tree)
               if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))} | ADDED
    defined |= {target.id for _, tree in trees("roles") for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
                for line in node.body if isinstance(line, ast.Assign)
                for target in line.targets if isinstance(target, ast.Name)}
    called = {(argument.value, f"{path.name}:{argument.lineno}") for path, tree in trees("coordinator", "stages")
              for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
              for position in POSITION.get(node.func.attr, ()) for argument in node.args[position:position + 1]
              if isinstance(argument, ast.Constant) and isinstance(argument.value, str)}
    assert len(called) > 30
    assert [place for name, place in called if name not in defined] == []
