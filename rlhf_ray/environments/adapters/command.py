"""A program as an agent: it runs in a directory of its own, asks the policy by the URL in its variables, and leaves its
reward in a file, in its output, or in its exit code. Standard library alone: it runs beside user code."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from rlhf_ray.environments.protocol import AgentSession
from rlhf_ray.user_code.keeper import SCRATCH
from rlhf_ray.user_code.loading import brief

PLACEHOLDER = re.compile(r"\{(\{[\w.-]+\})\}|\{([\w.-]+)\}")
"""A column in an argument; one in doubled braces stands for itself in single ones."""
SEED = "seed"
LAST_LINES = 20
"""Lines of its output that an error shows."""
LINE_LENGTH = 500
"""Longest line that an error shows, in characters."""
REWARD_BYTES = 1 << 16
"""Longest file or line with a reward."""
OF_OTHERS = ("ANTHROPIC_AUTH_TOKEN",)
"""Variables that a program does not inherit: clients would send this one, which is the user's, to the gateway."""
OUTPUT_S = 1.0
"""Time to read what a program printed before it ended."""


class ProgramFailed(Exception):
    """A program left no reward."""


def make(settings: Mapping[str, Any]) -> Callable[[dict[str, Any], AgentSession], dict[str, Any]]:
    """The program as an agent.

    Args:
        settings: of `config.environment_sources.CommandSource`.

    Raises:
        FileNotFoundError: there is no such program.
    """
    command = [_found(part) for part in settings["run"]]
    if not PLACEHOLDER.search(command[0]) and shutil.which(command[0]) is None:
        raise FileNotFoundError(f"there is no program {command[0]!r} (PATH is {os.environ.get('PATH', '')})")

    def agent(row: dict[str, Any], session: AgentSession) -> dict[str, Any]:
        return _Run(command, settings, row, session).result()

    agent.columns = columns_of(command)  # type: ignore[attr-defined]
    return agent


def columns_of(command: Sequence[str]) -> list[str]:
    """The columns of the row that its arguments name, each once."""
    names = (found[2] for part in command for found in PLACEHOLDER.finditer(part) if found[2] is not None)
    return [name for name in dict.fromkeys(names) if name != SEED]


def filled(argument: str, row: Mapping[str, Any], seed: int) -> str:
    """An argument with the values of the row in it: texts as they are, others as JSON.

    Raises:
        KeyError: the row has no such column.
    """
    def value(found: re.Match[str]) -> str:
        name = found[2]
        if name is None:
            return found[1]
        if name == SEED:
            return str(seed)
        if name not in row:
            raise KeyError(f"the argument {argument!r} names the column {name!r}, which the row lacks; its columns are "
                           f"{', '.join(row) or 'none'}. Write {{{{{name}}}}} for {{{name}}} itself")
        return row[name] if isinstance(row[name], str) else json.dumps(row[name], ensure_ascii=False, default=str)

    return PLACEHOLDER.sub(value, argument)


def _found(argument: str) -> str:
    """A file of the directory in which the run was started by its whole path: the program runs in another one."""
    path = Path(argument)
    with suppress(OSError, ValueError):  # it is no name of a file
        if not path.is_absolute() and path.is_file():
            return str(path.resolve())
    return argument


class _Run:
    """One run of the program, from its start to the end of all that it has started."""

    def __init__(self, command: Sequence[str], settings: Mapping[str, Any], row: Mapping[str, Any],
                 session: AgentSession) -> None:
        self._command = [filled(part, row, session.seed) for part in command]
        self._settings, self._row, self._session = settings, row, session
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        """Of its output and its errors."""
        self._line = ""
        """The last one of its output that is not blank."""

    def result(self) -> dict[str, Any]:
        """What an agent returns. Raises ProgramFailed: it left no reward."""
        directory = Path(tempfile.mkdtemp(dir=os.environ.get(SCRATCH)))
        try:
            (directory / "work").mkdir()
            row = directory / "row.json"
            row.write_text(json.dumps(dict(self._row), ensure_ascii=False, default=str), encoding="utf-8")
            code = self._run(directory / "work", row)
            return self._reward(directory / "work", code)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _run(self, work: Path, row: Path) -> int:
        """Run it to its end; returns its exit code."""
        session = self._session
        variables = {
            "OPENAI_BASE_URL": session.base_url, "OPENAI_API_BASE": session.base_url,
            "OPENAI_API_KEY": session.api_key,
            "ANTHROPIC_BASE_URL": session.anthropic_url, "ANTHROPIC_API_KEY": session.api_key,
            "RLHF_RAY_ROW": str(row), "RLHF_RAY_MODEL": session.model, "RLHF_RAY_SEED": str(session.seed),
            **self._settings["variables"]}
        inherited = {name: value for name, value in os.environ.items() if name not in OF_OTHERS}
        program = subprocess.Popen(
            self._command, cwd=work, env={**inherited, **variables}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        readers = [threading.Thread(target=self._read, args=(pipe, counts), daemon=True)
                   for pipe, counts in ((program.stdout, True), (program.stderr, False))]
        for reader in readers:
            reader.start()
        os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
        with suppress(PermissionError):  # what is left of its group
            os.killpg(program.pid, signal.SIGKILL)
        for reader in readers:  # what has left the group may have the pipes, and is killed by the keeper
            reader.join(OUTPUT_S)
        return program.wait()

    def _read(self, pipe: IO[bytes], counts: bool) -> None:
        """Pass on what it prints, line by line.

        Args:
            counts: the last line may be the reward.
        """
        with suppress(ValueError):
            while line := pipe.readline(REWARD_BYTES):
                text = line.decode("utf-8", "replace").rstrip("\r\n")
                sys.stdout.write(f"{text}\n")  # print would write twice, and two threads do
                sys.stdout.flush()
                self._last.append(text[:LINE_LENGTH])
                if counts and text.strip():
                    self._line = text.strip()

    def _reward(self, work: Path, code: int) -> dict[str, Any]:
        kind = self._settings["reward"]
        if kind == "exit_code":
            return {"reward": float(code == 0)}
        if kind == "none":
            if code:
                raise self._failed(code, "so it failed")
            return {"reward": None}
        if kind == "stdout":
            found = _number_in(self._line)
            if found is None:
                raise self._failed(code, "and the last line that it printed is no reward: "
                                   f"{brief(self._line) if self._line else 'it printed nothing'}")
            return found
        for name in ("reward.json", "reward.txt"):
            with suppress(OSError):
                text = _text_of(work / name)
                found = _number_in(text)
                if found is None:
                    raise self._failed(code, f"and its {name} holds no reward: {brief(text)}")
                return found
        raise self._failed(code, "and left neither reward.json nor reward.txt in its working directory")

    def _failed(self, code: int, why: str) -> ProgramFailed:
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        printed = "\n".join(f"  {line}" for line in self._last)
        last = f"; the last lines that it printed:\n{printed}" if printed else ""
        return ProgramFailed(f"the program {ended}, {why}{last}")


def _text_of(path: Path) -> str:
    """The beginning of a file, which is no link: a program of another user could make it one."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        found = file.read(REWARD_BYTES) or b""  # None of a pipe that is empty and open
        return found.decode("utf-8", "replace").strip()


def _number_in(text: str) -> dict[str, Any] | None:
    """The reward in a text, which is a number, or an object of JSON with "reward", whose other numbers are metrics;
    None if it has none."""
    value: Any = None
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
    if isinstance(value, dict):
        reward = value.pop("reward", None)
        return {"reward": reward, "info": value} if isinstance(reward, int | float) else None
    with suppress(ValueError):
        return {"reward": float(text)}
    return {"reward": float(value)} if isinstance(value, bool) else None
