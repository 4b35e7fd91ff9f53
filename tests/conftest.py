"""Settings of all tests: which run together in one process, and what the suite says of its own duration."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests.threads import one_torch_thread

# How long one example takes says more about the machine's other work than about the code.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

EXPECTED_S = 12 * 60
"""The default suite takes about ten minutes on two quiet cores. Machines are noisy: past this it only warns."""
_started = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_started] = time.monotonic()


class ByFile(LoadScopeScheduling):
    """Under `pytest -n` tests of one file share a process, and with it the file's fixtures. All tests that start a Ray
    cluster share one process: two clusters would wait for each other's cores."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "cluster" if file.startswith(("tests/cluster/", "tests/slow/")) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    """One thread a process where several share the cores: torch would start a thread for each core in every one."""
    if hasattr(session.config, "workerinput"):
        import torch

        torch.set_num_threads(1)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes with one thread in the test."""
    with one_torch_thread():
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Warn when the default suite took long."""
    seconds = time.monotonic() - config.stash[_started]
    if seconds > EXPECTED_S and config.option.markexpr == "not slow and not gpu":
        terminalreporter.write_line(
            f"The suite took {seconds / 60:.0f} minutes; two quiet cores need about ten. Its slowest tests "
            "are listed above; see what else the machine does.", yellow=True)
