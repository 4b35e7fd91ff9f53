"""`python -m tests.trip [COMMIT]`: count the files and lines that a sample passes from its admission to the publication
of the weights that it changed.

A tiny PPO run (critic, reference, reward model, two generators) is made with the code of a commit. From the end of its
first step to the end of its fourth, each process of the run notes which functions of `rlhf_ray` it enters or resumes;
starting, evaluating, saving and ending lie outside. Files that are there for the run rather than for a sample are
listed apart, by the rules printed with them. A file counts with all its lines; `entered` are the lines of the functions
that ran.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from fnmatch import fnmatch
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tests.cluster.tiny import Files, make_files
from tests.compare_commits import Settings, configuration, made, make, tree_of, uncommitted

FIRST, LAST, STEPS = 1, 4, 6
"""Steps after whose row of metrics the noting begins and ends; steps of the run, whose end would end processes."""

FOR_THE_RUN = {
    "metrics, progress and how they are shown": ("observability/*", "*/step_metrics.py", "*/live_*.py",
                                                 "*/step_profile.py"),
    "signs of life, and where workers are": ("*/heartbeat.py", "*/detectors.py", "*/node_drain.py",
                                             "*/health_monitor.py", "*/head_node.py", "*/nodes.py", "*/processes.py",
                                             "*/resource_pools.py"),
    "stopping, checkpoints, the best step": ("checkpoint/*", "files/*", "*/recovery.py", "*/stop.py",
                                            "*/early_stop.py", "*/best_checkpoint.py", "*/sample_saving.py"),
    "the frame around the steps": ("stages/*", "cli/*", "__init__.py", "failpoints.py"),
}
"""Patterns of files that are not part of a sample's trip, by what they are for."""

NOTING = '''
import ast, builtins, functools, json, threading, time
from importlib.machinery import PathFinder, SourceFileLoader

entered, noting = {}, False

def note(place):
    if noting:
        entered[place] = None

def note_made(place):
    # A dataclass and a NamedTuple have an __init__ or __new__ that was made from a text.
    def noted(cls):
        for name in ("__init__", "__new__"):
            made = cls.__dict__.get(name)
            if getattr(getattr(made, "__code__", None), "co_filename", "") == "<string>":
                def call(*args, **named):
                    note(place)
                    return made(*args, **named)
                call = functools.wraps(made)(call)
                setattr(cls, name, staticmethod(call) if name == "__new__" else call)
                break
        return cls
    return noted

builtins._note, builtins._note_made = note, note_made

class Marks(ast.NodeTransformer):
    # Calls of `note` in every function and every turn of a loop: a loop may have begun before the noting did.
    def __init__(self, file):
        self.file, self.names, self.place = file, [], None

    def call(self, function, place):
        return ast.Call(ast.Name(function, ast.Load()), [ast.Constant(place)], [])

    def inside(self, node, name):
        self.names.append(name)
        outer, self.place = self.place, (self.file, ".".join(self.names), node.lineno, node.end_lineno)
        self.generic_visit(node)
        place, self.place = self.place, outer
        self.names.pop()
        return place

    def function(self, node):
        place = self.inside(node, node.name)
        node.body.insert(ast.get_docstring(node) is not None, ast.Expr(self.call("_note", place)))
        return node

    def loop(self, node):
        self.generic_visit(node)
        if self.place:
            node.body.insert(0, ast.Expr(self.call("_note", self.place)))
        return node

    def visit_ClassDef(self, node):
        place = self.inside(node, node.name)
        node.decorator_list.insert(0, self.call("_note_made", (place[0], place[1], 0, 0)))
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = function
    visit_For = visit_AsyncFor = visit_While = loop

class Loader(SourceFileLoader):
    def source_to_code(self, data, path, *, _optimization=-1):
        marked = Marks(os.path.relpath(path, os.path.join(here, "rlhf_ray"))).visit(ast.parse(data))
        return compile(ast.fix_missing_locations(marked), path, "exec", dont_inherit=True, optimize=_optimization)

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target) if name.startswith("rlhf_ray.") else None
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec

def steps():
    try:
        with open(os.environ["TRIP_METRICS"]) as rows:
            return rows.read().count('"reward/mean"')
    except OSError:
        return 0

def watch():
    global noting
    while steps() < int(os.environ["TRIP_FIRST"]):
        time.sleep(0.02)
    noting = True
    while steps() < int(os.environ["TRIP_LAST"]):
        time.sleep(0.02)
    noting = False
    worker = any("default_worker" in word or "multiprocessing" in word for word in sys.argv)
    if entered:
        place = os.path.join(os.environ["TRIP_NOTES"], f"{os.getpid()}.json")
        with open(place + ".new", "w") as out:
            json.dump([[*place_of, worker] for place_of in entered], out)
        os.rename(place + ".new", place)

def begin():
    threading.Thread(target=watch, daemon=True).start()

if "TRIP_NOTES" in os.environ:
    sys.meta_path.insert(0, Finder)
    begin()
    os.register_at_fork(after_in_child=begin)
'''
"""What the sitecustomize.py of the tree does besides: it runs first in each Python process of the run, and marks the
package's functions when they are imported. (Profiling functions miss threads that Ray's C++ code starts.)"""


PLACES = (("D", False), ("W", True))
"""Letters of the processes that run a function, and whether they are workers."""


class Entered(NamedTuple):
    """A function that ran."""

    file: str
    """Below `rlhf_ray`."""
    name: str
    first: int
    """Its first line; 0 of one that a dataclass or NamedTuple has made."""
    last: int
    worker: bool
    """Whether a worker ran it, rather than the driver."""


def main() -> int:
    """Make the run and print the lists."""
    options = parsed()
    revision = options.commit or uncommitted() or "HEAD"
    with tempfile.TemporaryDirectory(prefix="trip-") as root:
        tree = tree_of(revision, Path(root) / "noted")
        with (tree / "sitecustomize.py").open("a") as file:
            file.write(NOTING)
        config = configuration("ppo", settings, make_files(made(Path(root) / "files")))
        run, notes = Path(root) / "run", made(Path(root) / "notes")
        failure = make("ppo", config, run, tree, {
            "TRIP_METRICS": str(run / "metrics.jsonl"), "TRIP_NOTES": str(notes), "TRIP_FIRST": str(FIRST),
            "TRIP_LAST": str(LAST)})
        if failure:
            print(failure)
            return 2
        found = [entered for path in notes.glob("*.json") for entered in read(path)]
        sizes = {path.relative_to(tree / "rlhf_ray").as_posix(): len(path.read_text().splitlines())
                 for path in (tree / "rlhf_ray").rglob("*.py")}
        processes = len(list(notes.glob("*.json")))
        print(f"{revision}: {processes} processes ran code of the package in steps {FIRST + 1} to {LAST}")
        show(found, sizes, options.functions)
    return 0


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.trip", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", metavar="COMMIT", nargs="?",
                        help="a hash, branch or tag (default: this checkout, with its changes to files that git knows)")
    parser.add_argument("--functions", action="store_true", help="name the functions of each file")
    return parser.parse_args()


def settings(files: Files) -> Settings:
    """A run of one worker of each role, but two generators, without evaluation."""
    return {"run": {"steps": STEPS}, "evaluation": None, "checkpoint": {"every": 0},
            "policy": {"workers": 1}, "critic": {"workers": 1, "zero_stage": 1}}


def read(path: Path) -> list[Entered]:
    """What a process has noted."""
    return [Entered(*noted) for noted in json.loads(path.read_text())]


def show(found: list[Entered], sizes: dict[str, int], names: bool) -> None:
    """Print the files of the trip by package, the files that are left out by rule, and the sums."""
    by_file: dict[str, list[Entered]] = defaultdict(list)
    for entered in found:
        by_file[entered.file].append(entered)
    trip = sorted(file for file in by_file if rule_of(file) is None)
    print("\nA sample's trip: file, lines, lines entered, functions entered; D: in the driver, W: in workers")
    for package, together in groupby(trip, key=lambda file: file.partition("/")[0] if "/" in file else ""):
        files = list(together)
        print(f"\n{package or 'rlhf_ray'}: {total(files, by_file, sizes)}")
        for file in files:
            where = "".join(letter for letter, worker in PLACES if runs_in(worker, by_file[file]))
            functions = functions_of(by_file[file])
            print(f"  {file:50}{sizes[file]:6}{lines_of(by_file[file]):6}{len(functions):5}  {where}")
            if names:
                print("      " + ", ".join(functions))
    print(f"\nThe trip: {total(trip, by_file, sizes)}")
    for letter, worker in PLACES:
        there = [file for file in trip if runs_in(worker, by_file[file])]
        print(f"  of them {letter}: {len(there)} files, {sum(sizes[file] for file in there):,} lines")
    for rule, patterns in FOR_THE_RUN.items():
        files = sorted(file for file in by_file if rule_of(file) == rule)
        print(f"\nleft out: {rule} ({', '.join(patterns)}): {total(files, by_file, sizes)}\n  " + ", ".join(files))
    print(f"\nThe package: {len(sizes)} files, {sum(sizes.values()):,} lines")


def rule_of(file: str) -> str | None:
    """The rule by which a file is no part of the trip."""
    return next((rule for rule, patterns in FOR_THE_RUN.items() if any(fnmatch(file, each) for each in patterns)), None)


def runs_in(worker: bool, found: Iterable[Entered]) -> bool:
    """Whether one of the functions ran in a worker, or in the driver."""
    return any(entered.worker is worker for entered in found)


def functions_of(found: Iterable[Entered]) -> list[str]:
    """Names of the functions that ran."""
    return sorted({entered.name for entered in found})


def lines_of(found: Iterable[Entered]) -> int:
    """Lines of the functions that ran."""
    return len({line for entered in found if entered.first for line in range(entered.first, entered.last + 1)})


def total(files: list[str], by_file: dict[str, list[Entered]], sizes: dict[str, int]) -> str:
    """The sums of some files, for people."""
    return (f"{len(files)} files, {sum(sizes[file] for file in files):,} lines, "
            f"{sum(lines_of(by_file[file]) for file in files):,} lines entered, "
            f"{sum(len(functions_of(by_file[file])) for file in files):,} functions")


if __name__ == "__main__":
    sys.exit(main())
