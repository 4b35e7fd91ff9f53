"""docs/chaos.md names every kind of fault and every failpoint."""

from pathlib import Path

from chaos.faults import KINDS
from rlhf_ray.failpoints import POINTS

PAGE = (Path(__file__).parents[3] / "docs/chaos.md").read_text()


def test_every_kind_of_fault_is_on_the_page():
    assert [name for name, kind in KINDS.items() if kind.target != "failpoint" and f"`{name}`" not in PAGE] == []


def test_every_failpoint_is_on_the_page_with_its_description():
    assert [name for name, words in POINTS.items() if f"| `{name}` | {words} |" not in PAGE] == []
