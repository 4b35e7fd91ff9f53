"""docs/chaos.md names every kind of fault and every failpoint."""

from pathlib import Path

from chaos.kinds import KINDS
from chaos.kinds.drivers import FailpointExit
from rlhf_ray.failpoints import POINTS

PAGE = (Path(__file__).parents[3] / "docs/chaos.md").read_text()


def test_every_kind_of_fault_is_on_the_page():
    names = [name for name, kind in KINDS.items() if not isinstance(kind, FailpointExit)]
    assert [name for name in names if f"`{name}`" not in PAGE] == []


def test_every_failpoint_is_on_the_page_with_its_description():
    assert [name for name, words in POINTS.items() if f"| `{name}` | {words} |" not in PAGE] == []
