"""What became of the mutants: the survivors that are known to change nothing, the summary, the verdict."""

import json
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutants.sites import Mutant

REQUIRED = 0.95


@dataclass(frozen=True)
class Equivalent:
    """A change that no test can notice, with the reason. It is matched by its text, not by file or line."""

    function: str
    before: str
    after: str
    reason: str

    def matches(self, mutant: Mutant) -> bool:
        return (self.function, self.before, self.after) == (mutant.function, mutant.before, mutant.after)


@dataclass(frozen=True)
class Outcome:
    """One mutant's end: `by` names the test that failed (or "time limit", "crash"), None if it survived."""

    path: str
    line: int
    function: str
    before: str
    after: str
    by: str | None
    tests: int
    reached: bool
    seconds: float
    reason: str | None = None

    @property
    def unexplained(self) -> bool:
        return self.by is None and self.reason is None

    def text(self) -> str:
        place = f"{self.path}:{self.line} {self.function}".rstrip()
        diff = [f"  - {line}" for line in self.before.split("\n")] + [f"  + {line}" for line in self.after.split("\n")]
        tests = f"  survived {self.tests} tests" + ("" if self.reached else ", none of which runs the line")
        return "\n".join([place, *diff, f"  equivalent: {self.reason}" if self.reason else tests])


@dataclass(frozen=True)
class Summary:
    seed: int
    drawn: int
    seconds: float
    outcomes: Sequence[Outcome]
    unused: Sequence[Equivalent] = ()

    @property
    def killed(self) -> int:
        return sum(outcome.by is not None for outcome in self.outcomes)

    @property
    def survivors(self) -> list[Outcome]:
        return sorted((o for o in self.outcomes if o.by is None), key=lambda o: (o.reason is not None, o.path, o.line))

    @property
    def passed(self) -> bool:
        """Enough mutants were killed, or each survivor has a reason."""
        enough = self.killed >= REQUIRED * len(self.outcomes)
        return bool(self.outcomes) and (enough or not any(outcome.unexplained for outcome in self.outcomes))

    def text(self) -> str:
        total, survivors = len(self.outcomes), self.survivors
        share = 100 * self.killed / max(total, 1)
        explained = sum(not outcome.unexplained for outcome in survivors)
        lines = [outcome.text() for outcome in survivors]
        lines += [f"equivalent.toml lists code that has changed: {e.function}\n  - {e.before}" for e in self.unused]
        lines.append(
            f"{self.killed} of {total} mutants killed ({share:.1f} %; {100 * REQUIRED:.0f} % required), "
            f"{len(survivors)} survived ({explained} equivalent), seed {self.seed}, {self.seconds / 60:.1f} min"
        )
        return "\n\n".join(lines) + "\n"

    def save(self, folder: Path) -> None:
        """Writes summary.json and summary.txt."""
        folder.mkdir(parents=True, exist_ok=True)
        data = {"seed": self.seed, "total": len(self.outcomes), "killed": self.killed, "passed": self.passed,
                "seconds": round(self.seconds, 1), "survivors": [asdict(o) for o in self.survivors],
                "outcomes": [asdict(o) for o in self.outcomes]}
        (folder / "summary.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
        (folder / "summary.txt").write_text(self.text(), encoding="utf-8")


def read_equivalents(path: Path) -> list[Equivalent]:
    with path.open("rb") as file:
        return [Equivalent(**entry) for entry in tomllib.load(file).get("mutant", [])]


def reason_for(mutant: Mutant, equivalents: Iterable[Equivalent]) -> str | None:
    return next((known.reason for known in equivalents if known.matches(mutant)), None)


def without_source(equivalents: Iterable[Equivalent], sources: Iterable[str]) -> list[Equivalent]:
    """Entries whose original lines are in no source file any more: the code has changed since."""
    stripped = ["\n".join(line.strip() for line in source.splitlines()) for source in sources]
    return [known for known in equivalents if not any(known.before in text for text in stripped)]
