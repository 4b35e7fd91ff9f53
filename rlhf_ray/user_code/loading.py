"""Loads user code by its name, and describes its errors. It runs in the process of the user's code, and imports the
standard library alone."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

ERROR_LENGTH = 2000
"""Longest text of an error, in characters."""
CODE_LENGTH = 200
"""Longest line of code that an error shows, in characters."""
BRIEF_LENGTH = 60
"""Longest text of a value that an error shows, in characters."""
LIBRARIES = ("<", *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
"""How file names begin whose code is not the user's."""
PACKAGE = str(Path(__file__).parents[1]) + os.sep


def load(target: str) -> Any:
    """What `module:name` or `file.py:name` names. Modules are searched in the working directory, and for a
    file beside it too, after the standard library and installed packages.

    Raises:
        ValueError, and whatever the import raises.
    """
    where, colon, name = target.rpartition(":")
    if not (where and colon and name):
        raise ValueError(f"{target!r} is not of the form module:name or file.py:name")
    sys.path.append(os.getcwd())
    target_object: Any = _file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    for part in name.split("."):
        target_object = getattr(target_object, part)
    return target_object


def definition(defined: Any) -> str:
    """File, line and code of the first line of a function or class, as in `describe`; "" for one without."""
    if inspect.isclass(defined):
        with suppress(OSError, TypeError):
            return _line(inspect.getsourcefile(defined) or "", inspect.getsourcelines(defined)[1])
    code = getattr(inspect.unwrap(defined), "__code__", None)
    return _line(code.co_filename, code.co_firstlineno) if code else ""


def describe(error: BaseException) -> str:
    """An exception, and below it file, line and code of the user's line that raised it."""
    text = error_text(error)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg}\n  {_line(error.filename, error.lineno or 1)}"
    line = users_line((f.filename, f.lineno or 1) for f in traceback.extract_tb(error.__traceback__))
    return f"{text}\n  {line}" if line else text


def error_text(error: BaseException) -> str:
    """An exception's name and text."""
    try:
        text = str(error)
    except Exception:  # its class is the user's
        text = "(its text cannot be read)"
    text = text[:ERROR_LENGTH].encode(errors="replace").decode()  # half of a surrogate pair is no character
    return f"{type(error).__name__}: {text}".removesuffix(": ")


def users_line(frames: Iterable[tuple[str, int]]) -> str:
    """The innermost line that is the user's, with its place; a library's if there is none, "" if there is neither.

    Args:
        frames: (file, line), outermost first.
    """
    foreign = [f for f in frames if not f[0].startswith(PACKAGE) and "importlib" not in f[0]]
    own = [f for f in foreign if not f[0].startswith(LIBRARIES)]
    return _line(*(own or foreign)[-1]) if foreign else ""


def _line(file: str, number: int) -> str:
    """A line of code with its place; the path is relative if it is below the working directory."""
    code = linecache.getline(file, number).strip()
    shown = code if len(code) <= CODE_LENGTH else f"{code[:CODE_LENGTH]} ..."
    with suppress(ValueError, OSError):
        file = str(Path(file).resolve().relative_to(Path.cwd()))
    return f"{file}:{number}: {shown}" if shown else f"{file}:{number}"


def _file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path} (relative paths start at {Path.cwd()})")
    sys.path.append(str(path.resolve().parent))
    name = path.stem
    while _is_taken(name, path):
        name = f"user_{name}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _is_taken(name: str, path: Path) -> bool:
    """Whether `import NAME` is to find another module than the file."""
    if name in sys.modules or name in sys.stdlib_module_names:
        return True
    found = importlib.machinery.PathFinder.find_spec(name)
    return found is not None and found.origin != str(path.resolve())


def brief(value: Any) -> str:
    """A value's type and the beginning of its text."""
    try:
        shown = repr(value[:BRIEF_LENGTH] if isinstance(value, str | bytes) else value)
    except Exception:  # its class is the user's
        shown = "(its text cannot be read)"
    return f"{type(value).__name__} {shown if len(shown) <= BRIEF_LENGTH else shown[: BRIEF_LENGTH - 3] + '...'}"
