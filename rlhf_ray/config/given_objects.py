"""Rows and functions that are given to a configuration in place of paths, from Python.

They are checked when the configuration is made, as every value is. Before a run, `stages.inputs` writes them to files
and puts the paths of these into the configuration. Until then each stands there as a text that names it.
"""

from __future__ import annotations

import builtins
import dis
import hashlib
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Annotated, Any

from pydantic import ValidatorFunctionWrapHandler, WrapValidator

from rlhf_ray.config.paths import UserPath

PLAIN = (str, int, float, bool, type(None))
"""Types of values that JSON has."""
FILE_ADVICE = 'or write the function into a file and name it: "rewards.py:name"'
HEADER = "from __future__ import annotations\n\n"
"""Annotations are not needed, and what they name may not be there."""


class GivenRows(str):
    """Rows of a data set, as JSON lines in `text`."""

    text: str

    @classmethod
    def of(cls, rows: Any) -> GivenRows:
        """Rows from a list of dicts, or a `datasets.Dataset`.

        Raises:
            ValueError: it is neither, is empty, or contains values that JSON does not have.
        """
        kind = "datasets.Dataset" if is_data_set(rows) else "list"
        lines = [_line(number, row) for number, row in enumerate(rows, start=1)]
        if not lines:
            raise ValueError(f"an empty {kind} was given; it needs at least one row")
        given = cls(f"{len(lines)} rows of a {kind}")
        given.text = "\n".join(lines) + "\n"
        return given


class GivenFunction(str):
    """A function, as the source of a file in `text`."""

    text: str
    function_name: str

    @classmethod
    def of(cls, function: Any) -> GivenFunction:
        """A function that is defined by `def`, with the imports that it uses.

        Raises:
            ValueError: it has no source, or uses what is not in its source.
        """
        source = _source(function)
        imports = _imports(function, source)
        given = cls(f"the function {function.__name__}")
        given.text = HEADER + "".join(f"{line}\n" for line in imports) + ("\n\n" if imports else "\n") + source
        given.function_name = function.__name__
        return given


def digest(given: GivenRows | GivenFunction) -> str:
    """SHA-256 of what is written to the file, in hexadecimal."""
    return hashlib.sha256(given.text.encode()).hexdigest()


def is_data_set(value: Any) -> bool:
    """Whether a value is a `datasets.Dataset`; the library is not imported for that."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(value, datasets.Dataset)


def is_rows(value: Any) -> bool:
    """Whether a value may be rows in place of a path."""
    return not isinstance(value, str | bytes | Mapping) and (isinstance(value, Sequence) or is_data_set(value))


def _rows_or_path(value: Any, path: ValidatorFunctionWrapHandler) -> str:
    if isinstance(value, GivenRows):
        return value
    if is_rows(value):
        return GivenRows.of(value)
    if type(value).__module__.startswith("datasets.") and isinstance(value, Mapping):
        raise ValueError(f"a {type(value).__name__} has several splits ({', '.join(value)}); give one of them, such as "
                         f"data[{next(iter(value), 'train')!r}]")
    if isinstance(value, (*PLAIN, Mapping)):
        return str(path(value))
    raise ValueError(f"got a {type(value).__module__}.{type(value).__qualname__}; give a path, a list of rows (each a "
                     "dict), or a datasets.Dataset")


def _function_or_path(value: Any, path: ValidatorFunctionWrapHandler) -> str:
    if isinstance(value, GivenFunction):
        return value
    return GivenFunction.of(value) if callable(value) else str(path(value))


DataPath = Annotated[UserPath, WrapValidator(_rows_or_path)]
"""Path of a data set, or from Python its rows."""
FunctionPath = Annotated[UserPath, WrapValidator(_function_or_path)]
"""`file.py:name` or `module:name`, or from Python the function itself."""


def _line(number: int, row: Any) -> str:
    if not isinstance(row, Mapping):
        raise ValueError(f"row {number} is {_brief(row)}; each row must be a dict of columns, such as "
                         '{"prompt": "..."}')
    for name, value in row.items():
        if (found := _foreign(value)) is not None or not isinstance(name, str):
            what = f"{name!r} is no text" if found is None else f"column {name!r} has {_brief(found)}"
            raise ValueError(f"row {number}: {what}, which JSON does not have; give texts, numbers, truth values, "
                             "None, lists and dicts with texts as keys, or save the rows to a .parquet file and name "
                             "it")
    return json.dumps(dict(row), ensure_ascii=False)


def _foreign(value: Any) -> Any:
    """The first value within `value` that JSON does not have; None without one."""
    if isinstance(value, Mapping):
        if (odd := next((key for key in value if not isinstance(key, str)), None)) is not None:
            return odd
        inner = list(value.values())
    elif isinstance(value, list | tuple):
        inner = list(value)
    else:
        return None if type(value) in PLAIN else value
    return next((found for each in inner if (found := _foreign(each)) is not None), None)


def _brief(value: Any) -> str:
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"


def _source(function: Any) -> str:
    """The source of a function, without the indentation of where it is defined.

    Raises:
        ValueError: it has none that could be run elsewhere.
    """
    if not isinstance(function, FunctionType):
        raise ValueError(f"got {_brief(function)}; give a function that is defined by def, {FILE_ADVICE}")
    if not function.__name__.isidentifier():
        raise ValueError(f"got a lambda; define the function by def, {FILE_ADVICE}")
    try:
        source = textwrap.dedent(inspect.getsource(function))
        module = compile(HEADER + source, "function", "exec", dont_inherit=True)
    except (OSError, TypeError, SyntaxError) as error:
        raise ValueError(f"the source of {function.__name__} cannot be read ({error}): it was not defined in a file or "
                         f"a notebook; define it there, {FILE_ADVICE}") from None
    names = [code.co_name for code in module.co_consts if isinstance(code, CodeType)]
    if function.__name__ not in names:
        raise ValueError(f"the source of {function.__name__} is not where it was defined: the file has changed since; "
                         "import it again")
    return source


def _imports(function: FunctionType, source: str) -> list[str]:
    """Import statements for the names that the source uses, but does not define.

    Raises:
        ValueError: some are not modules, or members of modules, of the standard library or an installed package.
    """
    code = compile(HEADER + source, "function", "exec", dont_inherit=True)
    loaded, attributes = {"__name__"}, set[str]()
    for each in _codes(code):
        attributes.update(each.co_names)
        loaded |= _names(each, "LOAD_NAME", "LOAD_GLOBAL") - _names(each, "STORE_NAME")
    original = inspect.unwrap(function)
    around = {**original.__globals__, **_closure(original)}
    own = {"__name__"}
    if around.get(function.__name__, function) in (function, original):
        own.add(function.__name__)
    lines, missing = [], []
    for name in sorted(loaded - own):
        if name in around:
            statements = _import_of(name, around[name], attributes)
            lines += statements
            if not statements:
                missing.append(name)
        elif not hasattr(builtins, name):
            missing.append(name)
    if missing:
        raise ValueError(f"the function {function.__name__} uses {', '.join(missing)}, which {_are(missing)} defined "
                         f"outside of it. It runs in a process of its own, to which its source and imports of "
                         f"installed packages are taken along, and nothing else: define {_them(missing)} inside the "
                         f"function, {FILE_ADVICE}")
    return lines


def _names(code: CodeType, *operations: str) -> set[str]:
    """Names to which these operations of a code object refer."""
    return {each.argval for each in dis.get_instructions(code) if each.opname in operations}


def _closure(function: FunctionType) -> dict[str, Any]:
    """The variables of enclosing functions that a function uses."""
    cells: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it has no value yet
            cells[name] = cell.cell_contents
    return cells


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _them(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _import_of(name: str, value: Any, attributes: set[str]) -> list[str]:
    """Statements that import a value by this name; none if it is not one of an installed package.

    Args:
        attributes: what the source reads from objects: `a.b` needs `import a.b` where that is a module.
    """
    if isinstance(value, ModuleType):
        if not _is_installed(value):
            return []
        lines = [f"import {value.__name__}" if value.__name__ == name else f"import {value.__name__} as {name}"]
        inner = [f"{value.__name__}.{attribute}" for attribute in sorted(attributes)
                 if isinstance(getattr(value, attribute, None), ModuleType)]
        return lines + [f"import {each}" for each in inner if each in sys.modules]
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    member = getattr(value, "__qualname__", "")
    if module is None or not _is_installed(module) or getattr(module, member, None) is not value:
        return []
    return [f"from {module.__name__} import {member}" + ("" if member == name else f" as {name}")]


def _is_installed(module: ModuleType) -> bool:
    """Whether a module belongs to the standard library or an installed package."""
    if module.__name__.partition(".")[0] in (*sys.stdlib_module_names, "rlhf_ray"):
        return True
    return bool({"site-packages", "dist-packages"} & set(Path(getattr(module, "__file__", None) or "").parts))
