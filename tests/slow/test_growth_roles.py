"""The study of growing cost on its real roles: every activity of each runs at the shortest length."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks.__main__ import one_thread_on_cpu
from benchmarks.growth.cells import make_apart
from benchmarks.growth.measured_role import Role, Task
from benchmarks.growth.roles import ROLES, CriticRole, GeneratorRole, PolicyRole, ReferenceRole, RewardRole
from benchmarks.growth.settings import LENGTHS, SIZES
from benchmarks.side_process import SideProcess

pytestmark = pytest.mark.slow
TINY = replace(SIZES[0], name="tiny", hidden=64, layers=1, heads=2, tokens=128)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("growth")
    one_thread_on_cpu()
    make_apart(made, TINY)
    return made


class Shortest(Role):
    """The tasks of a role at the shortest length alone."""

    @classmethod
    def tasks(cls) -> list[Task]:
        return [(activity, length) for activity, length in super().tasks() if length in (0, LENGTHS[0])]


class ShortGenerator(Shortest, GeneratorRole):
    pass


class ShortReference(Shortest, ReferenceRole):
    pass


class ShortReward(Shortest, RewardRole):
    pass


class ShortPolicy(Shortest, PolicyRole):
    pass


class ShortCritic(Shortest, CriticRole):
    pass


SHORT = {"generator": ShortGenerator, "reference scorer": ShortReference, "reward scorer": ShortReward,
         "policy learner": ShortPolicy, "critic learner": ShortCritic}


@pytest.mark.parametrize("name", ROLES)
def test_every_activity_is_timed_and_weighed(name: str, directory: Path) -> None:
    role = SHORT[name]
    with SideProcess(name, partial(role, TINY), directory) as process:
        for activity, _ in role.tasks():
            turn = process.turn()
            peak, share, *seconds = turn.proof
            assert seconds and all(s > 0 for s in seconds), activity
            assert 50 < peak < 4000 and 0 < share < 2, activity
