"""The layers of the packages: which may import which, where each engine is imported, and that imports are cheap."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "rlhf_ray"
LAYERS = [
    {"records", "errors"},
    {"failpoints", "internals"},
    {"config", "files", "user_code"},
    {"algorithms", "observability", "planning"},
    {"models", "data", "engine", "weights", "checkpoint"},
    {"environments"},
    {"rewards"},
    {"serving", "gateway"},
    {"roles"},
    {"cluster", "replay"},
    {"workers"},
    {"coordinator"},
    {"stages"},
    {"cli"},
]
LAYER = {package: number for number, packages in enumerate(LAYERS) for package in packages}
HOMES = {"ray": {"cluster", "workers", "cli", "observability"}, "deepspeed": {"engine"}, "vllm": {"roles", "weights"}}
HEAVY = {"torch", "transformers", "ray", "vllm", "deepspeed", "datasets", "plotly", "numpy", "pandas"}

SOURCES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("*.py"))}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TOOLS = {path: ast.parse(path.read_text(encoding="utf-8"))
         for folder in ("benchmarks", "chaos") for path in sorted((ROOT.parent / folder).rglob("*.py"))}
MODULES = {module_of(path) for path in (*SOURCES, *TOOLS)}


def imported(path: Path, tree: ast.AST) -> Iterator[str]:
    """Full names of all that a module imports, inside functions and under TYPE_CHECKING too."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in MODULES else base


def package_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "rlhf_ray" and len(parts) > 1 else None


def graph(name: str) -> dict[str, set[str]]:
    """Edges from importer to imported, between "packages" or between "modules"."""
    edges: dict[str, set[str]] = {}
    for path, tree in SOURCES.items():
        for target in imported(path, tree):
            a, b = module_of(path), target
            if name == "packages":
                a, b = package_of(a), package_of(b)
            if a and b and a != b and (name == "packages" or b in MODULES):
                edges.setdefault(a, set()).add(b)
    return edges


def test_every_package_has_a_layer():
    packages = {package for path in SOURCES if (package := package_of(module_of(path)))}
    assert packages <= set(LAYER), f"without a layer: {sorted(packages - set(LAYER))}"


def test_packages_import_lower_layers_only():
    upward = {f"{a} -> {b}" for a, targets in graph("packages").items() for b in targets if LAYER[a] < LAYER[b]}
    assert not upward


@pytest.mark.parametrize("kind", ["packages", "modules"])
def test_no_import_circles(kind):
    try:
        TopologicalSorter(graph(kind)).prepare()
    except CycleError as error:
        pytest.fail(f"circle of {kind}: {' <- '.join(error.args[1])}")


def test_benchmarks_and_chaos_have_no_import_circles():
    """Imports under TYPE_CHECKING and inside functions included."""
    edges = {module_of(path): {name for name in imported(path, tree) if name in MODULES} - {module_of(path)}
             for path, tree in TOOLS.items()}
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        pytest.fail(f"circle of modules: {' <- '.join(error.args[1])}")


def test_the_package_imports_neither_benchmarks_nor_chaos():
    assert not {name for path, tree in SOURCES.items() for name in imported(path, tree)
                if name.split(".")[0] in ("benchmarks", "chaos")}


@pytest.mark.parametrize("library", sorted(HOMES))
def test_an_engine_is_imported_in_its_packages_only(library):
    """Through the module about its internals too."""
    own = f"rlhf_ray.internals.{library}"
    strays = [
        str(path.relative_to(ROOT))
        for path, tree in SOURCES.items()
        if any(name == own or name.split(".")[0] == library for name in imported(path, tree))
        and module_of(path) != own and package_of(module_of(path)) not in HOMES[library]
    ]
    assert not strays


def private_names(tree: ast.Module) -> Iterator[str]:
    """Private modules and names that a module imports, and private attributes of other objects that it does not define
    itself, such as `node._secret`."""
    own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_self(node.value)}
    own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not is_self(node.value) and node.attr not in own:
            yield from [node.attr] if is_private(node.attr) else []
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            parts = (part for name in [*names, getattr(node, "module", None) or ""] for part in name.split("."))
            yield from filter(is_private, parts)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_what_is_private_in_a_library_is_used_in_the_module_about_its_internals_only():
    strays = {f"{path.relative_to(ROOT)}: {name}" for path, tree in SOURCES.items()
              if package_of(module_of(path)) != "internals" for name in private_names(tree)}
    assert strays == {
        "failpoints.py: _exit", "cluster/head_node.py: _exit", "environments/host.py: _current_frames",
        "user_code/sandbox_identity.py: _exit", "user_code/sandbox_process.py: _exit",
        "cluster/worker_template.py: _exit",
    }, "os._exit and sys._current_frames are public despite their names"


@pytest.mark.parametrize("module", ["rlhf_ray", "rlhf_ray.cli.main", "rlhf_ray.config.load", "rlhf_ray.errors",
                                    "rlhf_ray.rewards.judges"])
def test_importing_pulls_nothing_heavy(module):
    code = f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not HEAVY & set(answer.stdout.split())


def test_the_command_line_leaves_pydantic_for_later():
    code = "import sys, rlhf_ray.cli.main; print('pydantic' in sys.modules, 'yaml' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.split() == ["False", "False"]
