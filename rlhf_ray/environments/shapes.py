"""Recognises what a user brings by its shape, and runs one episode of it: tools, a class with tools, or an environment
in messages. Runs in the process of the user's code; transformers is imported only where schemas are made."""

from __future__ import annotations

import errno
import inspect
import os
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from rlhf_ray.environments.answers import (
    given_snapshot,
    plain_result,
    plain_reward,
    plain_snapshot,
    plain_start,
    plain_step,
    plain_tools,
    tool_content,
)
from rlhf_ray.environments.protocol import AgentSession, EnvironmentBroken, Reply, ToolCall
from rlhf_ray.user_code.loading import brief, definition, error_text

Shape = Literal["tools", "class", "environment", "agent"]
Schemas = list[dict[str, Any]]
Run = Callable[..., Any]
"""run(function, *args, **kwargs): calls a function, and runs a coroutine that it returns to its end."""

NOT_TOOLS = ("reset", "get_reward", "close")
"""Public methods of a class with tools that are no tools."""
KEEPING = {"snapshot": ("", 0), "restore": ("snapshot", 1)}
"""Methods by which an instance is brought to the state of another one: what they are given, and how many arguments."""
FORMS = ("a function or a list of functions with type hints and docstrings, a class with reset(**row) and typed "
         "methods, a class with reset(row, seed) and step(reply), or a function agent(row, session)")
AGENT = ["row", "session"]
"""Parameters by which a function is an agent."""
JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
    "object": (dict,), "null": (type(None),),
}


@dataclass
class Target:
    """What a user brings."""

    shape: Shape
    made: Any
    """The class; a function for each tool by name; or the agent."""
    schemas: Schemas
    """Of the tools, as far as they are known before `reset`."""
    replayable: bool
    place: str
    columns: list[str] = field(default_factory=list)
    """Columns of the row that `reset` of a class with tools, or the program of an agent, requires."""
    restorable: bool = False
    """It has `snapshot` and `restore`."""
    answers_calls: bool = False
    """A class with tools has `call_tool`, which answers the calls of all its tools."""

    def facts(self) -> dict[str, Any]:
        """What the process that started this one needs to know."""
        return {"shape": self.shape, "tools": self.schemas, "replayable": self.replayable, "place": self.place,
                "columns": self.columns, "restorable": self.restorable}


def recognise(brought: Any, schemas: Schemas | None = None) -> Target:
    """The shape of an object.

    Args:
        schemas: of its tools, if they are known; they are made if not.

    Raises:
        TypeError: it has none of the shapes; says what is missing.
    """
    if inspect.isclass(brought):
        return _class(brought, schemas)
    if _is_agent(brought):
        return Target("agent", brought, [], True, definition(brought), list(getattr(brought, "columns", ())))
    functions = brought if isinstance(brought, list | tuple) else [brought]
    if not functions or not all(inspect.isroutine(each) for each in functions):
        wrong = next((each for each in functions if not inspect.isroutine(each)), brought)
        raise TypeError(f"it is {brief(wrong)}, and must be {FORMS}")
    tools = {each.__name__: each for each in functions}
    if len(tools) < len(functions):
        raise TypeError(f"two of its tools have the same name; their names are {[f.__name__ for f in functions]}")
    return Target("tools", tools, schemas if schemas is not None else [_schema(each) for each in functions],
                  all(getattr(each, "replayable", True) for each in functions), definition(functions[0]))


def _is_agent(brought: Any) -> bool:
    if not inspect.isroutine(brought):
        return False
    try:
        return list(inspect.signature(brought).parameters) == AGENT
    except ValueError:  # of a function in C
        return False


def _class(brought: type, schemas: Schemas | None) -> Target:
    name, reset = brought.__name__, getattr(brought, "reset", None)
    if not callable(reset):
        raise TypeError(f"the class {name} has no reset; it must be {FORMS}")
    if required := _required(inspect.getattr_static(brought, "__init__"), bound=False):
        raise TypeError(f"{name}.__init__ requires {', '.join(required)}; it is called without arguments")
    replayable, place = bool(getattr(brought, "replayable", True)), definition(brought)
    if {"row", "seed"} <= set(inspect.signature(reset).parameters):
        step = getattr(brought, "step", None)
        if not callable(step):
            raise TypeError(f"the class {name} has reset(row, seed), but no step(reply)")
        if wrong := _uncalled(brought, "step", 1):
            raise TypeError(f"{name}.step is called with one argument, the reply, but {wrong}")
        return Target("environment", brought, [], replayable, place, restorable=_restorable(brought, also_one=True))
    restorable = _restorable(brought, also_one=False)
    own_schemas = getattr(brought, "tool_schemas", None)
    if callable(own_schemas) and callable(getattr(brought, "call_tool", None)):
        if schemas is None:
            schemas = plain_tools(own_schemas(), "tool_schemas")
        return Target("class", brought, schemas, replayable, place, restorable=restorable, answers_calls=True)
    no_tools = (*NOT_TOOLS, *(KEEPING if restorable else ()))
    names = dict.fromkeys(each for base in reversed(brought.__mro__[:-1]) for each in vars(base))
    tools = [each for each in names if not each.startswith("_") and each not in no_tools
             and inspect.isroutine(getattr(brought, each, None))]
    if not tools:
        raise TypeError(f"the class {name} has reset, but no public method that could be a tool, and no reset(row, "
                        f"seed) with step(reply); it must be {FORMS}")
    if schemas is None:
        schemas = [_schema(_bound(brought, each), f"; an environment has reset(row, seed), and not reset"
                           f"{inspect.signature(reset)}" if each == "step" else "") for each in tools]
    columns = [each for each in _required(reset, bound=False) if each != "seed"]
    return Target("class", brought, schemas, replayable, place, columns, restorable)


def _restorable(brought: type, *, also_one: bool) -> bool:
    """Whether a class has `snapshot` and `restore`.

    Args:
        also_one: having one of them is an error; otherwise it is a tool.

    Raises:
        TypeError: one is missing, or cannot be called as it will be.
    """
    found = [name for name in KEEPING if inspect.isroutine(getattr(brought, name, None))]
    if not found or (len(found) == 1 and not also_one):
        return False
    for name, (given, count) in KEEPING.items():
        call = f"{brought.__name__}.{name}({given})"
        if name not in found:
            raise TypeError(f"{call} is missing: an environment has both snapshot() and restore(snapshot), or neither; "
                            f"it has {found[0]}\n  {definition(getattr(brought, found[0]))}")
        if wrong := _uncalled(brought, name, count):
            raise TypeError(f"{call} cannot be called so: {wrong}. A class has both snapshot() and restore(snapshot), "
                            f"or neither\n  {definition(getattr(brought, name))}")
    return True


def _bound(brought: type, name: str) -> Any:
    """A method as it is of an instance, without making one."""
    method = inspect.getattr_static(brought, name)
    return types.MethodType(method, object()) if inspect.isfunction(method) else getattr(brought, name)


def _schema(function: Any, hint: str = "") -> dict[str, Any]:
    from transformers.utils import get_json_schema

    try:
        return dict(get_json_schema(function))
    except Exception as error:
        raise TypeError(f"the tool `{function.__name__}` has no schema: {type(error).__name__}: {error}{hint}. A tool "
                        "needs type hints, and a docstring that describes it and, below Args:, each argument\n"
                        f"  {definition(getattr(function, '__func__', function))}") from None


def _required(function: Any, *, bound: bool) -> list[str]:
    """Names of the parameters without a default; of a method without the first."""
    if function is object.__init__:
        return []
    parameters = list(inspect.signature(function).parameters.values())[0 if bound else 1:]
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def _uncalled(brought: type, name: str, count: int) -> str:
    """Why a method cannot be called with `count` arguments; "" if it can."""
    try:
        inspect.signature(_bound(brought, name)).bind(*[None] * count)
    except TypeError as error:
        return str(error)
    return ""


class Episode:
    """One episode of a target: an instance of the class, a use of the tools, or a run of the agent."""

    def __init__(self, target: Target, run: Run, began_tool: Callable[[str], None]) -> None:
        """
        Args:
            run: runs the user's functions and coroutines.
            began_tool: is told which tool is called, and "" when it has returned.
        """
        self._target, self._run, self._began_tool = target, run, began_tool
        self._instance: Any = None
        self._tools: dict[str, Any] = {}

    def start(self, row: dict[str, Any], seed: int) -> dict[str, Any]:
        """The fields of `Start`; "observation" is the text that the reset of a class with tools returned.

        Raises whatever the user's code raises, and TypeError or ValueError for an answer that is none.
        """
        target = self._target
        if target.shape == "tools":
            self._tools = target.made
            return {"messages": None, "tools": target.schemas, "observation": ""}
        self._make()
        if target.shape == "environment":
            return plain_start(self._run(self._instance.reset, row=row, seed=seed))
        observation = self._run(self._instance.reset, **self._columns(row, seed))
        if not isinstance(observation, str | None):
            raise TypeError(f"reset returned {brief(observation)}; of a class with tools it must return text or None")
        return {"messages": None, "tools": target.schemas, "observation": observation or ""}

    def _make(self) -> None:
        self._instance = self._target.made()
        names = map(_name, self._target.schemas)
        if self._target.answers_calls:
            self._tools = dict.fromkeys(names)
        else:
            self._tools = {name: getattr(self._instance, name) for name in names}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Begin where another instance gave this snapshot. Raises whatever the user's code raises."""
        self._make()
        self._run(self._instance.restore, given_snapshot(snapshot))

    def snapshot(self) -> dict[str, Any] | None:
        """The instance's state, as `plain_snapshot`; None if it gives none. Raises as `start`."""
        return plain_snapshot(self._run(self._instance.snapshot)) if self._target.restorable else None

    def _columns(self, row: dict[str, Any], seed: int) -> dict[str, Any]:
        parameters = inspect.signature(self._instance.reset).parameters.values()
        takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters)
        given = {"seed": seed, **row} if any(p.name == "seed" for p in parameters) else row
        if missing := [name for name in _required(self._instance.reset, bound=True) if name not in given]:
            raise TypeError(f"reset requires {', '.join(missing)}, which the row lacks; its columns are "
                            f"{', '.join(row) or 'none'}")
        return dict(given) if takes_all else {p.name: given[p.name] for p in parameters if p.name in given}

    def step(self, reply: Reply) -> dict[str, Any]:
        """The fields of `Step`. Raises as `start`; a tool's error is part of the answer."""
        if self._target.shape == "environment":
            return plain_step(self._run(self._instance.step, reply))
        results = [self._call(call) for call in reply.tool_calls]
        return {
            "messages": [{"role": "tool", "name": call.name, "tool_call_id": call.id, "content": content}
                         for call, (content, _) in zip(reply.tool_calls, results, strict=True)],
            "reward": 0.0, "done": not results, "truncated": False, "info": {},
            "tool_errors": sum(failed for _, failed in results),
        }

    def _call(self, call: ToolCall) -> tuple[str, bool]:
        """What the policy reads, and whether it is an error."""
        def run(tool: Any, **arguments: Any) -> Any:
            self._began_tool(call.name)
            try:
                return self._run(tool, **arguments)
            finally:
                self._began_tool("")

        if self._target.answers_calls and call.name in self._tools:
            return self._answered(call)
        return tool_answer(self._tools, self._target.schemas, call.name, call.arguments, run)

    def run(self, row: dict[str, Any], session: AgentSession) -> dict[str, Any]:
        """The fields of `Result`: what an agent returns. Raises as `start`."""
        reach_directly(session.base_url)
        return plain_result(self._run(self._target.made, row, session))

    def _answered(self, call: ToolCall) -> tuple[str, bool]:
        """`_call` of a class whose `call_tool` answers all calls, and raises where the environment has failed."""
        self._began_tool(call.name)
        try:
            content, failed = self._run(self._instance.call_tool, call.name, call.arguments)
        finally:
            self._began_tool("")
        return tool_content(content, call.name), bool(failed)

    def reward(self) -> float:
        """`get_reward()` of a class that has it; otherwise 0. Raises as `start`."""
        method = getattr(self._instance, "get_reward", None)
        if method is None:
            return 0.0
        return plain_reward(self._run(method), "get_reward")

    def close(self) -> None:
        """The user's `close`, if there is one; raises what it raises."""
        method = getattr(self._instance, "close", None)
        if callable(method):
            self._run(method)


def _called(function: Any, **arguments: Any) -> Any:
    return function(**arguments)


def _name(schema: dict[str, Any]) -> str:
    return str(schema["function"]["name"])


def exhausted(error: BaseException) -> Literal["", "memory", "files"]:
    """What a process has none left of by an error, perhaps because of another episode."""
    if isinstance(error, MemoryError):
        return "memory"
    return "files" if isinstance(error, OSError) and error.errno == errno.EMFILE else ""


def tool_answer(tools: Mapping[str, Any], schemas: Schemas, name: str, arguments: Any, run: Run = _called
                ) -> tuple[str, bool]:
    """What the policy reads of a call of a tool, and whether it is an error. An agent that runs tools itself answers by
    it as an environment does.

    Example:
        >>> tool_answer({"add": add}, [get_json_schema(add)], "add", {"a": 1, "b": 2})
        ("3", False)

    Args:
        tools: functions by name.
        schemas: of them all.
        arguments: by name, as the policy wrote them.

    Raises:
        TypeError, ValueError: the tool returned neither text nor what JSON holds.
        MemoryError, OSError: the process has run out of memory, or of open files.
        EnvironmentBroken: the tool raised it.
    """
    if name not in tools:
        return f"Error: there is no tool {name!r}; the tools are {', '.join(tools)}", True
    schema = next(each for each in schemas if _name(each) == name)
    if problem := arguments_problem(schema["function"].get("parameters", {}), arguments):
        return f"Error: {name}: {problem}", True
    try:
        result = run(tools[name], **arguments)
    except BaseException as error:  # also SystemExit: the policy reads it
        if exhausted(error) or isinstance(error, EnvironmentBroken):
            raise
        return f"Error: {error_text(error)}", True
    return tool_content(result, name), False


def arguments_problem(parameters: Mapping[str, Any], arguments: Any) -> str:
    """What is wrong with the arguments of a tool call, by the tool's JSON schema; "" if nothing."""
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(arguments, dict):
        return f"the arguments are {brief(arguments)}, and must be an object"
    if missing := [name for name in required if name not in arguments]:
        return f"the argument {missing[0]!r} is missing"
    for name, value in arguments.items():
        if name not in properties:
            return f"there is no argument {name!r}; the arguments are {', '.join(properties) or 'none'}"
        if not _fits(properties[name], value):
            wanted = {key: part for key, part in properties[name].items() if key != "description"}
            return f"the argument {name!r} is {brief(value)}, and must be {wanted}"
    return ""


def _fits(schema: Mapping[str, Any], value: Any) -> bool:
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema:
        return any(_fits(each, value) for each in schema["anyOf"])
    if "enum" in schema and value not in schema["enum"]:
        return False
    kinds = schema.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if kinds and not any(_is(value, kind) for kind in kinds):
        return False
    return not isinstance(value, list) or all(_fits(schema.get("items", {}), each) for each in value)


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, JSON_TYPES.get(kind, (object,)))


def reach_directly(url: str) -> None:
    """Have the HTTP clients of this process, and of those that it starts, ask the host of a URL without a proxy: where
    the environment names one, they ask it even for 127.0.0.1 (httpx 0.28, curl 8). Both spellings of the variable are
    read, and either may hide the other, so both get what each has."""
    host = urlsplit(url).hostname or ""
    names = ("no_proxy", "NO_PROXY")
    given = [each.strip() for name in names for each in os.environ.get(name, "").split(",")]
    if "*" not in given and any(host not in os.environ.get(name, "").split(",") for name in names):
        direct = ",".join(dict.fromkeys(filter(None, [host, *given])))
        os.environ.update(dict.fromkeys(names, direct))
