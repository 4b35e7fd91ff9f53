"""Which unit tests run which lines, and how long each test takes."""

import json
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage

from tests.mutants.sites import Mutant


@dataclass
class LineCoverage:
    """What the unit tests run.

    Attributes:
        seconds: of every test that passes.
        lines: {path: {line: tests that run it}}; a file of tests stands for all of its tests.
        failed: tests that fail or are skipped.
        modules: names of the modules that the tests import.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)

    def add(self, recorded: dict[str, Any]) -> None:
        """Adds what a `Recorder` saved."""
        self.seconds |= recorded["seconds"]
        self.failed += recorded["failed"]
        self.modules += [name for name in recorded["modules"] if name not in set(self.modules)]
        for path, lines in recorded["lines"].items():
            known = self.lines.setdefault(path, {})
            for line, tests in lines.items():
                known.setdefault(int(line), []).extend(tests)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(vars(self)))

    @classmethod
    def load(cls, path: Path) -> "LineCoverage":
        read = cls()
        read.add(json.loads(path.read_text()))
        return read

    def reach(self, mutant: Mutant) -> bool:
        """Whether a test runs the mutant's statement."""
        return mutant.at_import or bool(self._tests(mutant.path, mutant.lines))

    def tests_for(self, mutant: Mutant) -> list[list[str]]:
        """Tests that run the mutant's statement, in batches: those of its package first.

        Where none does, and of a statement that runs at the import, they are those that run anything in its file.
        Each batch begins with its fastest tests.
        """
        tests = set() if mutant.at_import else self._tests(mutant.path, mutant.lines)
        tests = tests or self._tests(mutant.path, self.lines.get(mutant.path, ()))
        beside = f"tests/unit/{'/'.join(mutant.path.split('/')[1:-1])}/"
        near = [test for test in tests if test.startswith(beside)]
        far = [test for test in tests if not test.startswith(beside)]
        return [sorted(batch, key=lambda test: (self.seconds[test], test)) for batch in (near, far) if batch]

    def _tests(self, path: str, lines: Iterable[int]) -> set[str]:
        known = self.lines.get(path, {})
        named = {name for line in lines for name in known.get(line, ())}
        return {test for test in self.seconds if test in named or _file_of(test) in named}


class Recorder:
    """pytest plugin: measures the lines of `targets` (files of the folder `root`) that each test runs.

    What the fixtures of a test run, and its subprocesses, counts for all tests of its file: they may share it.
    """

    def __init__(self, root: Path, targets: Sequence[str], folder: Path) -> None:
        """`folder` is for what subprocesses measure."""
        self._root, self._folder = root, folder
        files = [str(root / path) for path in targets]
        self._seconds: dict[str, float] = defaultdict(float)
        self._bad: set[str] = set()
        folder.mkdir(parents=True)
        shutil.copy(Path(__file__).with_name("measured_process.py"), root / "sitecustomize.py")
        os.environ["MUTANTS_MEASURE"] = json.dumps({"targets": files, "folder": str(folder)})
        self._coverage = Coverage(data_file=None, include=files, config_file=False)
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        started = time.monotonic()
        self._coverage.switch_context(_file_of(item.nodeid))
        try:
            return (yield)
        finally:
            self._seconds[item.nodeid] = time.monotonic() - started
            self._coverage.switch_context("")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self._coverage.switch_context(_file_of(item.nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._bad.add(report.nodeid)
        if report.failed:
            print(f"FAILED {report.nodeid}\n{report.longreprtext}")

    def recorded(self) -> dict[str, Any]:
        """Ends the measurement; what `LineCoverage.add` takes."""
        self._coverage.stop()
        (self._root / "sitecustomize.py").unlink()
        data = self._coverage.get_data()
        lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for file in data.measured_files():
            for line, contexts in data.contexts_by_lineno(file).items():
                lines[file][line].update(context for context in contexts if context)
        for saved in self._folder.glob("*.json"):
            process = json.loads(saved.read_text())
            for file, run in process["lines"].items():
                for line in run:
                    lines[file][line].add(_file_of(process["test"]))
        names = {file: str(Path(file).relative_to(self._root)) for file in lines}
        return {
            "seconds": {test: taken for test, taken in self._seconds.items() if test not in self._bad},
            "failed": sorted(self._bad), "modules": list(sys.modules),
            "lines": {names[file]: {line: sorted(tests) for line, tests in by_line.items() if tests}
                      for file, by_line in lines.items()},
        }


def _file_of(test: str) -> str:
    return test.split("::")[0]
