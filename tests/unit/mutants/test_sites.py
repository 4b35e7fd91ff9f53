"""Which places of a source are mutated, and which mutants a seed draws."""

import random
from textwrap import dedent

import pytest

from tests.mutants.sites import draw, mutant_of, sites_of


def mutants(source: str) -> set[tuple[str, str]]:
    """Every change of the source: the lines before and after."""
    source = dedent(source)
    module, sites = sites_of(source)
    made = [mutant_of("a.py", source, module, site, variant) for site in sites for variant in site.variants]
    return {(mutant.before, mutant.after) for mutant in made if mutant}


def test_operators_numbers_and_arguments_are_changed():
    assert mutants("x = f(a) + 2\n") == {
        ("x = f(a) + 2", changed)
        for changed in ("x = None", "x = f(a) - 2", "x = f(None) + 2", "x = f(a) + 3")
    }


@pytest.mark.parametrize("source", [
    '"""One module."""\n',
    "def f(x: Literal[1] | None) -> Literal[2]:\n    '''Docs.'''\n    pass\n",
    "@decorator(1, flag=True)\ndef f():\n    pass\n",
    "raise ValueError('no such row', 1)\n",
    "log.warning('row %s', 1)\n",
    "self.log.warning('row %s', 1)\n",
    "reached('update')\n",
    "__all__ = ['f']\n",
    "if TYPE_CHECKING:\n    x = 1\n",
    "def f(x):\n    return f'row {x + 1} is missing'\n",
], ids=["docstring", "annotation", "decorator", "error", "log", "log of an object", "failpoint", "exports", "types",
        "sentence"])
def test_what_has_no_behaviour_is_no_site(source):
    assert mutants(source) == set()


def test_a_short_formatted_string_and_sql_are_sites():
    assert ("f'step-{n + 1}'", "f'step-{n - 1}'") in mutants("f'step-{n + 1}'\n")
    assert ("f('SELECT a FROM b')", "f('XXSELECT a FROM bXX')") in mutants("f('SELECT a FROM b')\n")


def test_a_change_that_is_no_program_is_left_out():
    assert all("return" not in after for _, after in mutants("for x in y:\n    break\n"))


def test_a_mutant_names_its_function_and_the_lines_of_its_statement():
    source = "class Buffer:\n    def size(self):\n        return max(\n            0,\n            self.rows)\n"
    module, sites = sites_of(source)
    site = next(site for site in sites if module.code_for_node(site.node) == "0")
    mutant = mutant_of("a.py", source, module, site, site.variants[0])
    assert mutant is not None
    assert (mutant.function, mutant.lines, mutant.line, mutant.before, mutant.after) == (
        "Buffer.size", range(3, 6), 4, "0,", "1,")
    assert mutant.source == source.replace("0,", "1,")


def test_what_runs_at_the_import_is_known():
    _, sites = sites_of("class A:\n    x = 1\n\n    def f(self, y=2):\n        return 3\n")
    assert [(site.lines.start, site.at_import) for site in sites] == [(2, True), (2, True), (4, True), (5, False)]


def test_of_a_compound_statement_only_the_header_counts():
    _, sites = sites_of("if a and b:\n    pass\n")
    assert [site.lines for site in sites] == [range(1, 2)]


SOURCES = {"a.py": "x = 1 + 2\n" * 20, "b.py": "y = f(1)\n" * 20}


def test_the_same_seed_draws_the_same_mutants_and_another_draws_others():
    first = list(draw(SOURCES, 20, seed=3))
    assert first == list(draw(dict(reversed(SOURCES.items())), 20, seed=3))
    assert first[:5] == list(draw(SOURCES, 5, seed=3))
    assert first != list(draw(SOURCES, 20, seed=4))


def test_no_site_is_drawn_twice_and_all_are_in_the_end():
    count = sum(len(sites_of(source)[1]) for source in SOURCES.values())
    assert len(list(draw(SOURCES, 10**6, seed=random.randrange(100)))) == count
