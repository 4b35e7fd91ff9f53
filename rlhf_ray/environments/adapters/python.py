"""A tool that runs a policy's programs in a sandbox."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from rlhf_ray.environments.protocol import EnvironmentBroken
from rlhf_ray.user_code.process import PrintedLines
from rlhf_ray.user_code.sandbox import Job, Limits, Outcome, Sandbox, SandboxBroken, SandboxPool

WHO = "the tool python"
TRACEBACK_LINES = 12
"""Last lines of a traceback that the policy reads."""
T = TypeVar("T")


def make(settings: dict[str, Any]) -> Any:
    """The tool, as a function; with `keep_state` as a class.

    Raises:
        SandboxBroken: programs cannot be held back on this machine.
    """
    background, limits = Background(), Limits(**settings["sandbox"])
    timeout_s, longest = settings["timeout_s"], settings["max_characters"]
    printed = PrintedLines("", WHO)
    pool = SandboxPool(WHO, limits, settings["programs"], printed)
    background.run(pool.start())

    def python(code: str) -> str:
        """Runs a Python program and returns what it printed. Each call is a new program: names and files of earlier
        calls are gone.

        Args:
            code: the program; it prints what is to be seen
        """
        return shown(background.run(pool.run(Job(code, timeout_s))), timeout_s, longest)

    class Interpreter:
        def reset(self) -> None:
            self._sandbox = Sandbox(WHO, limits, printed)

        def python(self, code: str) -> str:
            """Runs Python code and returns what it printed. Names and files stay for the next call.

            Args:
                code: the code; it prints what is to be seen
            """
            return shown(background.run(self._sandbox.turn(code, timeout_s)), timeout_s, longest)

        def close(self) -> None:
            background.run(self._sandbox.stop())

    if not settings["keep_state"]:
        return python
    background.run(pool.stop())  # it has shown that programs are held back
    return Interpreter


def shown(outcome: Outcome, timeout_s: float, longest: int) -> str:
    """What the policy reads.

    Args:
        longest: characters.
    """
    errors = "\n".join(outcome.errors.rstrip().split("\n")[-TRACEBACK_LINES:])
    parts = [outcome.output.rstrip(), errors, _ending(outcome, timeout_s)]
    text = "\n".join(part for part in parts if part)
    if len(text) > longest:
        text = f"{text[:longest // 2]}\n... ({len(text) - longest} characters) ...\n{text[-(longest // 2):]}"
    return text or "(nothing was printed)"


def _ending(outcome: Outcome, timeout_s: float) -> str:
    """How a program ended, if it did not end as it should."""
    killed = {"time": f"killed: it did not end within {timeout_s:g} s", "disk": "killed: its files became too large",
              "output": "killed: it printed too much", "": ""}[outcome.killed]
    status = "" if killed or not outcome.status or outcome.errors else f"ended with {outcome.status}"
    return f"({killed or status})" if killed or status else ""


class Background:
    """An event loop in a thread of its own, which lives as long as this process: a worker of a sandbox ends with the
    thread that started it, and the threads of episodes do not last."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="sandbox", daemon=True).start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that runs there.

        Raises:
            EnvironmentBroken: the sandbox does not work.
        """
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        except SandboxBroken as error:
            raise EnvironmentBroken(str(error)) from None
