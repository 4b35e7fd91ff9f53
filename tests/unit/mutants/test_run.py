"""A small project is mutated as the whole one is: copied, measured, and tested in forks."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.mutants.fork_server import ForkServer, enter, run_tests
from tests.mutants.line_coverage import LineCoverage, Recorder
from tests.mutants.sites import Mutant
from tests.mutants.tree_copy import TreeCopy, copies_of

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
CODE = "def double(x):\n    return 2 * x\n\n\ndef unused(x):\n    return 3 * x\n"
TESTS = """
import time
from shop.arithmetic import double

def test_of_four():
    time.sleep(0.1)
    assert double(4) == 8

def test_of_zero():
    assert double(0) == 0

def test_of_nothing():
    pass
"""
ELSEWHERE = """
import subprocess
import sys
import pytest
from shop.arithmetic import unused

@pytest.fixture(scope="module")
def six():
    return unused(2)

def test_a_fixture(six):
    assert six == 6

def test_its_other_user(six):
    assert six == 6

def test_a_process():
    subprocess.run([sys.executable, "-c", "from shop.arithmetic import double; double(3)"], check=True)
"""
TEST_FILE, OTHER_FILE = "checks/test_arithmetic.py", "checks/test_elsewhere.py"


@pytest.fixture
def copies(tmp_path: Path) -> list[TreeCopy]:
    """Two copies of a checkout of one module and one file of tests."""
    checkout = tmp_path / "checkout"
    for name, text in {"shop/arithmetic.py": CODE, TEST_FILE: TESTS, OTHER_FILE: ELSEWHERE, "pyproject.toml": "",
                       ".gitignore": "left_out.py\n", "shop/left_out.py": ""}.items():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(checkout)], check=True)
    return copies_of(checkout, tmp_path / "scratch", 2)


def only(server: ForkServer, work, limit_s: float = 60.0):
    [ended] = server.map(["job"], work, lambda _: limit_s)
    return ended


def measured_tests(copies: list[TreeCopy], tmp_path: Path, *files: str) -> LineCoverage:
    def measure(_: str, slot: int) -> dict:
        enter(copies[slot].path, tmp_path / "t")
        recorder = Recorder(copies[slot].path, ["shop/arithmetic.py"], tmp_path / "processes")
        pytest.main(["-q", "-p", "no:cacheprovider", *files], plugins=[recorder])
        return recorder.recorded()

    tests = LineCoverage()
    tests.add(only(ForkServer(tmp_path, 2), measure).answer)
    return tests


@pytest.fixture
def measured(copies, tmp_path) -> LineCoverage:
    return measured_tests(copies, tmp_path, TEST_FILE)


def mutant(line: int, after: str) -> Mutant:
    lines = CODE.splitlines()
    lines[line - 1] = f"    {after}"
    return Mutant("shop/arithmetic.py", "", range(line, line + 1), False, line, "", after, "\n".join(lines))


def killer(copies: list[TreeCopy], tests: LineCoverage, mutant: Mutant, tmp_path: Path):
    def work(_: str, slot: int) -> str | None:
        copies[slot].mutate(mutant.path, mutant.source)
        enter(copies[slot].path, tmp_path / "t")
        return run_tests(tests.tests_for(mutant), tmp_path / "t", test_limit_s=60)

    ended = only(ForkServer(tmp_path, 2), work)
    copies[ended.slot].restore()
    return ended.answer


def test_tests_that_run_the_line_are_chosen_fast_ones_first(measured):
    assert measured.failed == []
    assert measured.tests_for(mutant(2, "return 0")) == [[f"{TEST_FILE}::test_of_zero", f"{TEST_FILE}::test_of_four"]]
    assert measured.reach(mutant(2, "return 0"))


def test_a_line_that_no_test_runs_gets_the_tests_of_its_file(measured):
    assert not measured.reach(mutant(6, "return 0"))
    assert len(measured.tests_for(mutant(6, "return 0"))[0]) == 2


def test_lines_of_fixtures_and_processes_belong_to_all_tests_of_their_file(copies, tmp_path):
    tests = measured_tests(copies, tmp_path, OTHER_FILE)
    everyone = {f"{OTHER_FILE}::{name}" for name in ("test_a_fixture", "test_its_other_user", "test_a_process")}
    assert set(tests.tests_for(mutant(6, "return 0"))[0]) == everyone
    assert set(tests.tests_for(mutant(2, "return 0"))[0]) == everyone
    assert not (copies[0].path / "sitecustomize.py").exists()


def test_a_mutant_is_killed_by_the_first_test_that_fails_and_the_copy_is_whole_again(copies, measured, tmp_path):
    assert killer(copies, measured, mutant(2, "return 0"), tmp_path) == f"{TEST_FILE}::test_of_four"
    assert killer(copies, measured, mutant(2, "return 2 + x"), tmp_path) == f"{TEST_FILE}::test_of_zero"
    assert killer(copies, measured, mutant(2, "return x * 2"), tmp_path) is None
    assert all((copy.path / "shop/arithmetic.py").read_text() == CODE for copy in copies)


def test_a_mutant_that_cannot_be_imported_is_killed(copies, measured, tmp_path):
    broken = Mutant("shop/arithmetic.py", "", range(2, 3), True, 2, "", "", "double = None()")
    assert killer(copies, measured, broken, tmp_path) == f"collecting {TEST_FILE}"


def test_a_copy_holds_what_git_would_and_restores_what_tests_delete_or_change(copies):
    copy = copies[0]
    assert not (copy.path / "shop/left_out.py").exists()
    (copy.path / TEST_FILE).unlink()
    copy.mutate("shop/arithmetic.py", "")
    assert set(copy.restore()) == {"shop/arithmetic.py", TEST_FILE}
    assert (copy.path / TEST_FILE).read_text() == TESTS
    assert copy.restore() == []


def test_a_fork_whose_time_is_up_is_killed_with_its_children(tmp_path):
    def hang(_: str, slot: int) -> None:
        child = subprocess.Popen(["sleep", "600"])
        (tmp_path / "child").write_text(str(child.pid))
        time.sleep(600)

    ended = only(ForkServer(tmp_path, 1), hang, limit_s=3.0)
    assert (ended.timed_out, ended.crashed, ended.answer) == (True, False, None)
    state = Path("/proc", (tmp_path / "child").read_text(), "stat")
    deadline = time.monotonic() + 30
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_crash_is_an_end_and_an_error_of_the_work_itself_is_raised(tmp_path):
    ended = only(ForkServer(tmp_path, 1), lambda job, slot: os.kill(os.getpid(), signal.SIGKILL))
    assert (ended.timed_out, ended.crashed) == (False, True)
    with pytest.raises(RuntimeError, match="division by zero"):
        only(ForkServer(tmp_path, 1), lambda job, slot: 1 / 0)


def test_forks_share_the_slots(tmp_path):
    ended = list(ForkServer(tmp_path, 2).map(range(1, 6), lambda job, slot: [job * job, slot], lambda job: 60.0))
    assert sorted(end.answer[0] for end in ended) == [1, 4, 9, 16, 25]
    assert {end.slot for end in ended} <= {0, 1}
    assert all(end.answer[1] == end.slot for end in ended)


def test_the_command_lists_its_mutants_without_running_any():
    command = [sys.executable, "-m", "tests.mutants", "--list", "--count", "3", "--only", "*/algorithms/kl.py"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=True)
    assert shown.stdout.count("rlhf_ray/algorithms/kl.py:") == 3
