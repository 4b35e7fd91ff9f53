"""The places of a source file where a mutation would change behaviour, and a draw among them.

The mutations are mutmut's: swapped operators and comparisons, numbers plus one, changed strings, arguments dropped or
replaced by None, assignments of None, break for continue, both branches of a conditional expression. One site is one
node of the syntax tree that at least one of them applies to.
"""

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher

import libcst as cst
import libcst.matchers as m
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

LOGGERS = m.Name("log") | m.Name("logger") | m.Name("logging") | m.Name("warnings")
# Nodes that are no sites, nor is anything in them: texts for people, what no run evaluates, what runs once at import.
WITHOUT_BEHAVIOUR: dict[type[cst.CSTNode], m.BaseMatcherNode] = {
    cst.Annotation: m.Annotation(),
    cst.Decorator: m.Decorator(),
    cst.Import: m.Import(),
    cst.ImportFrom: m.ImportFrom(),
    cst.Raise: m.Raise(),
    cst.Expr: m.Expr(value=m.SimpleString() | m.ConcatenatedString()),  # docstrings
    cst.Call: m.Call(func=m.Attribute(value=LOGGERS | m.Attribute(attr=LOGGERS)) | m.Name("reached")),  # failpoints
    cst.Assign: m.Assign(targets=[m.AssignTarget(target=m.Name("__all__"))]),
    cst.If: m.If(test=m.Name("TYPE_CHECKING")),
}
SQL = re.compile(r"\b(SELECT|INSERT|UPDATE|DELETE|CREATE|WHERE|PRAGMA|FROM|VALUES|IN|IS)\b")


@dataclass(frozen=True)
class Mutant:
    """One changed copy of a source file.

    Attributes:
        path: the file, relative to the repository's root.
        function: dotted name of the class and function around the change; "" at module level.
        lines: the lines of the statement that is changed, as in the original file.
        at_import: whether the statement runs when the module is imported, rather than in a function.
        line: first line that differs.
        before: the lines that differ, without their indentation.
        after: the same lines in the mutant.
        source: the whole mutated file.
    """

    path: str
    function: str
    lines: range
    at_import: bool
    line: int
    before: str
    after: str
    source: str


@dataclass(frozen=True)
class Site:
    node: cst.CSTNode
    function: str
    lines: range
    at_import: bool
    variants: tuple[cst.CSTNode, ...]


class SiteVisitor(cst.CSTVisitor):
    """Collects the sites of a module in the order of its text."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.sites: list[Site] = []
        self._names: list[tuple[cst.CSTNode, str]] = []
        self._statements: list[tuple[cst.CSTNode, range]] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if type(node) in WITHOUT_BEHAVIOUR and m.matches(node, WITHOUT_BEHAVIOUR[type(node)]):
            return False
        if isinstance(node, cst.BaseString) and is_sentence(node):
            return False
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            self._names.append((node, node.name.value))
        if isinstance(node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            self._statements.append((node, self._lines_of(node)))
        operators = [operator for kind, operator in mutation_operators if isinstance(node, kind)]
        variants = tuple(variant for operator in operators for variant in operator(node))
        if variants:
            function = ".".join(name for _, name in self._names)
            at_import = not any(isinstance(outer, cst.FunctionDef) for outer, _ in self._statements[:-1])
            self.sites.append(Site(node, function, self._statements[-1][1], at_import, variants))
        if isinstance(node, cst.Assert):  # its message is a text
            node.test.visit(self)
            return False
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        """Called for nodes that were skipped, too."""
        for stack in (self._names, self._statements):
            if stack and stack[-1][0] is original_node:
                stack.pop()

    def _lines_of(self, statement: cst.SimpleStatementLine | cst.BaseCompoundStatement) -> range:
        """A simple statement's lines; of a compound one those of its header."""
        span = self.get_metadata(PositionProvider, statement)
        if isinstance(statement, cst.SimpleStatementLine):
            return range(span.start.line, span.end.line + 1)
        first = self.get_metadata(PositionProvider, statement.body).start.line
        return range(span.start.line, max(first, span.start.line + 1))


def is_sentence(node: cst.BaseString) -> bool:
    """Whether the literal parts of a string are three words or more, and no statement of SQL."""
    parts = m.findall(node, m.SimpleString() | m.FormattedStringText())
    text = "".join(getattr(part, "raw_value", None) or getattr(part, "value", "") for part in parts)
    return len(text.split()) >= 3 and not SQL.search(text)


def sites_of(source: str) -> tuple[cst.Module, list[Site]]:
    wrapper = MetadataWrapper(cst.parse_module(source))
    visitor = SiteVisitor()
    wrapper.visit(visitor)
    return wrapper.module, visitor.sites


def mutant_of(path: str, source: str, module: cst.Module, site: Site, variant: cst.CSTNode) -> Mutant | None:
    """The mutant in which `variant` takes the place of the site's node; None if it is no valid program."""
    changed = module.deep_replace(site.node, variant)
    mutated = changed.code if isinstance(changed, cst.Module) else ""
    try:
        compile(mutated, path, "exec", dont_inherit=True)
    except SyntaxError:
        return None
    old, new = source.splitlines(), mutated.splitlines()
    edits = [edit for edit in SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if edit[0] != "equal"]
    if not edits:
        return None
    start, end, new_start, new_end = edits[0][1], edits[-1][2], edits[0][3], edits[-1][4]
    return Mutant(path, site.function, site.lines, site.at_import, start + 1, _stripped(old[start:end]),
                  _stripped(new[new_start:new_end]), mutated)


def draw(sources: Mapping[str, str], count: int, seed: int) -> Iterator[Mutant]:
    """`count` mutants (fewer if there are fewer sites) of the files {path: source}: sites uniformly, one change each.

    The same sources, count and seed give the same mutants; a greater count gives more of the same.
    """
    parsed = {path: sites_of(source) for path, source in sorted(sources.items())}
    places = [(path, index) for path, (_, sites) in parsed.items() for index in range(len(sites))]
    randomness = random.Random(seed)
    randomness.shuffle(places)
    drawn = 0
    for path, index in places:
        if drawn == count:
            return
        module, sites = parsed[path]
        mutant = mutant_of(path, sources[path], module, sites[index], randomness.choice(sites[index].variants))
        if mutant is not None:
            drawn += 1
            yield mutant


def _stripped(lines: list[str]) -> str:
    return "\n".join(line.strip() for line in lines)
