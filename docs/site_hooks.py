"""Makes a site of the pages as they are in the repository, where every link works without a site.

Pages outside docs/ get a place in it, files that pages link to become pages with their text, and links and images are
rewritten to both. `make docs` builds the site.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "launch/README.md", "docker/README.md")
"""Of the site, beside those in docs/."""
LINK = re.compile(r"(\]\(|src=\")(?![a-z]+:|#)([^)\s\"#]+)")
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
NAMED_FENCE = re.compile(r"^```(\w+) ([\w./-]+)$", re.MULTILINE)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".json": "json"}


def source_of(page: str) -> str:
    """Path in the repository of a page of the site."""
    return page if page in PAGES else f"docs/{page}"


def page_of(path: str) -> str:
    """Page of the site for a path in the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if path in PAGES else f"files/{path}.md"


def links(source: str, text: str) -> set[str]:
    """Paths in the repository that a page links to."""
    prose = FENCE.sub("", text)
    return {posixpath.normpath(posixpath.join(posixpath.dirname(source), target)) for _, target in LINK.findall(prose)}


def page_with(path: str) -> str:
    """A page with the text of a file, or with the names in a folder."""
    file = ROOT / path
    if file.is_dir():
        names = "\n".join(f"- `{entry.name}`" for entry in sorted(file.iterdir()) if not entry.name.startswith("__"))
        return f"# {path}\n\n{names}\n"
    text = file.read_text(encoding="utf-8")
    return f"# {path}\n\n````{LANGUAGES.get(file.suffix, 'text')}\n{text}\n````\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    for page in PAGES:
        files.append(File.generated(config, page, content=(ROOT / page).read_text(encoding="utf-8")))
    pages = [file for file in files if file.src_uri.endswith(".md")]
    linked = {path for file in pages for path in links(source_of(file.src_uri), file.content_string)}
    for path in sorted(linked):
        if not path.startswith("docs/") and path not in PAGES and (ROOT / path).exists():
            files.append(File.generated(config, page_of(path), content=page_with(path),
                                        inclusion=InclusionLevel.NOT_IN_NAV))
    return files




def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links, and give named blocks of code a title."""
    here = page.file.src_uri
    if here.startswith("files/"):
        return markdown
    source = source_of(here)

    def rewritten(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        target = posixpath.relpath(page_of(path), posixpath.dirname(here) or ".")
        return match[1] + target

    parts = FENCE.split(NAMED_FENCE.sub(r'```\1 title="\2"', markdown))
    return "".join(part if part.startswith("```") else LINK.sub(rewritten, part) for part in parts)
