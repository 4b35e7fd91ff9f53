"""Settings of all tests: which run together in one process, and what the suite says of its own duration."""

import time
from pathlib import Path

import pytest
from hypothesis import settings

# How long one example takes says more about the machine's other work than about the code.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

TESTS = Path(__file__).parent
EXPECTED_S = 12 * 60
"""The default suite takes less than ten minutes on two quiet cores. Machines are noisy: past this it only warns."""
_started = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_started] = time.monotonic()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under `pytest -n`: tests that start a Ray cluster run one after the other in one process, which begins with them;
    tests of one file share a process, and with it the file's fixtures."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    items.sort(key=lambda item: not _needs_a_cluster(item))
    for item in items:
        group = "cluster" if _needs_a_cluster(item) else str(item.path.relative_to(TESTS))
        item.add_marker(pytest.mark.xdist_group(group))


def _needs_a_cluster(item: pytest.Item) -> bool:
    return item.get_closest_marker("cluster") is not None or (TESTS / "cluster") in item.path.parents


def pytest_collection_finish(session: pytest.Session) -> None:
    """One thread a process where several share the cores: torch would start a thread for each core in every one."""
    if hasattr(session.config, "workerinput"):
        import torch

        torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Warn when the default suite took long."""
    seconds = time.monotonic() - config.stash[_started]
    if seconds > EXPECTED_S and config.option.markexpr == "not slow and not gpu":
        terminalreporter.write_line(
            f"The suite took {seconds / 60:.0f} minutes; on two quiet cores it takes less than ten. Its slowest tests "
            "are listed above; see what else the machine does.", yellow=True)
