"""Running the command line inside the test's process, as `main` does, with a stage that records how it was called."""

import sys
from types import ModuleType
from typing import Any

import pytest

from rlhf_ray.cli.main import main


class Outcome:
    """What one command line did."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def command_line(monkeypatch, capsys):
    """command_line("ppo", "c.yaml") -> Outcome."""

    def _run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["rlhf-ray", *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        return Outcome(code, *capsys.readouterr())

    return _run


@pytest.fixture
def stage(monkeypatch):
    """stage("ppo", error=None) puts a recording run() where that stage's is; returns the list of its calls."""

    def _put(name: str, error: BaseException | None = None) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        calls = []

        def run(*args: Any, **kwargs: Any) -> dict[str, Any]:
            calls.append((args, kwargs))
            if error:
                raise error
            return {}

        module = ModuleType(f"rlhf_ray.stages.{name}")
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"rlhf_ray.stages.{name}", module)
        return calls

    return _put


@pytest.fixture
def ppo_file(tmp_path):
    path = tmp_path / "ppo.yaml"
    path.write_text("model: {path: m}\nrewards: {main: {type: model, path: r}}\nprompts: {path: p}\n")
    return str(path)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """Commands set other libraries' log levels; tests leave the environment as it was."""
    import os

    from rlhf_ray.cli.library_logging import LEVELS

    for variable in LEVELS:
        monkeypatch.setenv(variable, os.environ.get(variable, ""))
        if not os.environ[variable]:
            monkeypatch.delenv(variable)
