"""What a machine must have is tried once, and what it lacks is named with the reason."""

from chaos.kinds import KINDS, not_possible
from chaos.requirements import Requirement, failed, first_missing


def test_a_requirement_is_tried_once():
    tries = []
    requirement = Requirement("a wish", lambda: tries.append(1))
    assert requirement.missing() is None and requirement.missing() is None and tries == [1]


def test_the_first_that_is_not_met_gives_the_reason():
    def refused():
        raise PermissionError("not permitted")

    met, missing = Requirement("air", lambda: None), Requirement("a loop device", refused)
    assert first_missing([met]) is None
    assert first_missing([met, missing]) == "a loop device: not permitted"


def test_a_command_that_fails_is_named_with_its_message():
    assert failed(("true",)) is None
    assert failed(("true",), ("sh", "-c", "echo no such thing >&2; exit 3")) == (
        "`sh -c echo no such thing >&2; exit 3` failed with exit code 3: no such thing")


def test_most_kinds_require_nothing():
    needy = [name for name, kind in KINDS.items() if kind.requires]
    assert len(needy) < len(KINDS) / 2
    assert not_possible(set(KINDS) - set(needy)) == {}
