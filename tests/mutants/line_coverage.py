"""Which unit tests run which lines, and how long each test takes."""

import json
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
    """Seconds of every test that passes, and for {path: {line: tests}} those that run the line."""

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
        """Whether a test runs the mutant's statement; one at module level is run by its import."""
        return bool(self._tests(mutant.path, mutant.lines))

    def tests_for(self, mutant: Mutant) -> list[list[str]]:
        """Tests that run the mutant's statement, or its file where none does, in batches: those of its package first.

        Each batch begins with its fastest tests.
        """
        tests = self._tests(mutant.path, mutant.lines) or self._tests(mutant.path, self.lines.get(mutant.path, ()))
        beside = f"tests/unit/{'/'.join(mutant.path.split('/')[1:-1])}/"
        near = [test for test in tests if test.startswith(beside)]
        far = [test for test in tests if not test.startswith(beside)]
        return [sorted(batch, key=lambda test: (self.seconds[test], test)) for batch in (near, far) if batch]

    def _tests(self, path: str, lines: Iterable[int]) -> set[str]:
        known = self.lines.get(path, {})
        return {test for line in lines for test in known.get(line, ()) if test in self.seconds}


class Recorder:
    """pytest plugin: measures the lines of `targets` (files of the folder `root`) that each test runs."""

    def __init__(self, root: Path, targets: Sequence[str]) -> None:
        self._root = root
        self._coverage = Coverage(data_file=None, include=[str(root / path) for path in targets], config_file=False)
        self._seconds: dict[str, float] = defaultdict(float)
        self._bad: set[str] = set()
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        started = time.monotonic()
        try:
            return (yield)
        finally:
            self._seconds[item.nodeid] = time.monotonic() - started
            self._coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._bad.add(report.nodeid)
        if report.failed:
            print(f"FAILED {report.nodeid}\n{report.longreprtext}")

    def recorded(self) -> dict[str, Any]:
        """Ends the measurement; what `LineCoverage.add` takes."""
        self._coverage.stop()
        data = self._coverage.get_data()
        lines: dict[str, dict[int, list[str]]] = {}
        for file in data.measured_files():
            by_line = {line: [test for test in tests if test] for line, tests in data.contexts_by_lineno(file).items()}
            lines[str(Path(file).relative_to(self._root))] = {line: tests for line, tests in by_line.items() if tests}
        return {
            "seconds": {test: taken for test, taken in self._seconds.items() if test not in self._bad},
            "failed": sorted(self._bad), "lines": lines, "modules": list(sys.modules),
        }
