"""The pages of the documentation, and their blocks of code."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("**/*.md")), *sorted(ROOT.glob("*/README.md"))]
_FENCE = re.compile(r"(?:^<!-- not run here: (?P<why>.+?) -->\n)?^```(?P<language>\w+)(?: (?P<file>\S+))?\n"
                    r"(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"# ([\w.]+\.(?:yaml|py))(?::|\n)")


@dataclass(frozen=True)
class Fence:
    """A block of code."""

    language: str
    file: str
    """Of which it is the text; empty if it names none."""
    text: str
    why_not_run: str
    """A test file that runs these commands instead, or what they need that no test has."""


def fences(page: Path) -> list[Fence]:
    """The blocks of a page, in its order."""
    found = _FENCE.finditer(page.read_text(encoding="utf-8"))
    return [Fence(m["language"], m["file"] or _named(m["text"]), m["text"], m["why"] or "") for m in found]


def write_files(page: Path, directory: Path) -> None:
    """The files whose texts a page has."""
    for fence in fences(page):
        if fence.file:
            (directory / fence.file).write_text(fence.text)


def _named(text: str) -> str:
    name = _NAME.match(text)
    return name[1] if name else ""
