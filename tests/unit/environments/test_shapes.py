"""What a user brings is recognised by its shape, and its tools are called as the policy wrote them. In this process."""

import asyncio
import errno
import inspect

import pytest

from rlhf_ray.environments.protocol import Reply, Start, Step, ToolCall
from rlhf_ray.environments.shapes import Episode, arguments_problem, recognise


def run(function, *args, **kwargs):
    """As a host's thread does."""
    result = function(*args, **kwargs)
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def begin(brought, row=None, seed=0):
    """(episode, answer of its start)."""
    episode = Episode(recognise(brought), run, lambda name: None)
    return episode, episode.start(row or {}, seed)


def add(a: int, b: int = 1) -> int:
    """Adds.

    Args:
        a: first
        b: second
    """
    return a + b


async def search(query: str, limits: list[int] | None = None) -> dict:
    """Searches.

    Args:
        query: what for
        limits: how much
    """
    if query == "nothing":
        raise LookupError("found\nnothing")
    if query == "exit":
        raise SystemExit(3)
    return {"found": query, "ü": limits}


class Table:
    """A class with tools, as TRL takes it."""

    def reset(self, question, seed, level="easy"):
        self.asked, self.seed, self.level, self.score = question, seed, level, 0
        return f" Level {level}, seed {seed}."

    def look_up(self, key: str) -> str:
        """Looks up.

        Args:
            key: which
        """
        self.score += 1
        return f"{self.asked}/{key}"

    def get_reward(self):
        return self.score / 2

    def _hidden(self):
        raise AssertionError


class Board:
    """An environment."""

    replayable = False

    async def reset(self, row, seed):
        return Start([{"role": "user", "content": f"{row['a']} {seed}"}])

    def step(self, reply):
        return Step([{"role": "user", "content": reply.text}], 1.5, done=reply.text == "end")


def test_functions_are_tools():
    for brought, names in ((add, ["add"]), ([add, search], ["add", "search"]), ((search,), ["search"])):
        target = recognise(brought)
        assert target.shape == "tools" and [s["function"]["name"] for s in target.schemas] == names
        assert target.replayable and "test_shapes.py" in target.place and f"def {names[0]}" in target.place
    assert target.schemas[0]["function"]["parameters"]["required"] == ["query"]


def test_a_class_with_reset_and_typed_methods_is_a_class_with_tools():
    target = recognise(Table)
    assert target.shape == "class" and [s["function"]["name"] for s in target.schemas] == ["look_up"]
    assert target.columns == ["question"] and "class Table" in target.place
    episode, start = begin(Table, {"question": "q", "answer": 5}, seed=3)
    assert start == {"messages": None, "tools": target.schemas, "observation": " Level easy, seed 3."}
    step = episode.step(Reply("", tool_calls=[ToolCall("look_up", {"key": "k"}, "id")]))
    assert step["messages"] == [{"role": "tool", "name": "look_up", "tool_call_id": "id", "content": "q/k"}]
    assert (step["reward"], step["done"], step["tool_errors"], episode.reward()) == (0.0, False, 0, 0.5)
    assert episode.step(Reply("the end"))["done"]


def test_the_reset_of_a_class_with_tools_gets_what_it_takes():
    class All(Table):
        def reset(self, **row):
            super().reset(str(row), None)

    class Neither(Table):
        def reset(self):
            super().reset("q", None)

    row = {"question": "q", "x": 1, "level": "hard"}
    assert begin(Table, row, 7)[1]["observation"] == " Level hard, seed 7."
    assert begin(All, row, 7)[0]._instance.asked == str(row)
    assert begin(Neither, row, 7)[1]["observation"] == ""
    with pytest.raises(TypeError, match="reset requires question, which the row lacks; its columns are x"):
        begin(Table, {"x": 1})


def test_a_class_with_reset_of_row_and_seed_and_step_is_an_environment():
    target = recognise(Board)
    assert target.shape == "environment" and not target.replayable and target.schemas == []
    episode, start = begin(Board, {"a": 1}, 5)
    assert start == {"messages": [{"role": "user", "content": "1 5"}], "tools": [], "observation": ""}
    assert episode.step(Reply("end")) == {"messages": [{"role": "user", "content": "end"}], "reward": 1.5, "done": True,
                                          "truncated": False, "info": {}, "tool_errors": 0}
    assert episode.reward() == 0.0


class Keeps:
    """Both of an environment that can be restored."""

    async def snapshot(self):
        return [self.n]

    def restore(self, kept, strict=True):
        (self.n,) = kept


class KeptBoard(Keeps, Board):
    """May be restored, although it is not replayable."""


class KeptTable(Keeps, Table):
    """Has both, so that they are no tools."""


class TableThatRestores(Table):
    """Has one of them, which is a tool."""

    def restore(self, name: str) -> None:
        """Restores a file.

        Args:
            name: which
        """


def test_snapshot_and_restore_are_recognised_in_both_shapes_if_there_are_both():
    names = {brought: [each["function"]["name"] for each in recognise(brought).schemas]
             for brought in (Board, KeptBoard, Table, KeptTable, TableThatRestores)}
    assert names == {Board: [], KeptBoard: [], Table: ["look_up"], KeptTable: ["look_up"],
                     TableThatRestores: ["look_up", "restore"]}
    restorable = {brought: recognise(brought).restorable for brought in names}
    assert restorable == {Board: False, KeptBoard: True, Table: False, KeptTable: True, TableThatRestores: False}
    assert not recognise(KeptBoard).replayable and recognise(KeptTable).facts()["restorable"] is True
    assert not recognise(add).restorable


def test_an_episode_goes_on_in_another_instance_from_a_snapshot():
    first, _ = begin(KeptTable, {"question": "q"})
    first._instance.n = 4
    second = Episode(recognise(KeptTable), run, lambda name: None)
    second.restore(first.snapshot())
    assert second._instance.n == 4 and second._instance is not first._instance
    second._instance.asked = second._instance.score = 1
    step = second.step(Reply("", tool_calls=[ToolCall("look_up", {"key": "k"})]))
    assert step["messages"][0]["content"] == "1/k", "its tools are those of the new instance"
    assert begin(Board, {"a": 1})[0].snapshot() is None


class OnlySnapshot(Board):
    def snapshot(self): ...


class OnlyRestore(Board):
    def restore(self, kept): ...


class SnapshotOfWhat(Keeps, Board):
    def snapshot(self, what): ...


class RestoresNothing(Keeps, Table):
    def restore(self): ...


@pytest.mark.parametrize("brought, said", [
    (OnlySnapshot, r"OnlySnapshot\.restore\(snapshot\) is missing: .* it has snapshot\n  .*test_shapes.py:\d+: def "),
    (OnlyRestore, r"OnlyRestore\.snapshot\(\) is missing: .* it has restore\n  .*test_shapes.py:\d+: def restore"),
    (SnapshotOfWhat, r"SnapshotOfWhat\.snapshot\(\) cannot be called so: missing a required argument: 'what'"
                     r".*\n  .*test_shapes.py:\d+: def snapshot\(self, what\)"),
    (RestoresNothing, r"RestoresNothing\.restore\(snapshot\) cannot be called so: too many positional arguments"
                      r".*\n  .*test_shapes.py:\d+: def restore\(self\)"),
])
def test_one_of_snapshot_and_restore_or_one_with_other_arguments_is_refused_with_its_line(brought, said):
    with pytest.raises(TypeError, match=said):
        recognise(brought)


def untyped(a):
    """Adds.

    Args:
        a: first
    """


def undescribed(a: int):
    """Adds."""


def undocumented(a: int): ...


class NoReset:
    def step(self, reply): ...


class NoStep:
    def reset(self, row, seed): ...


class WrongStep:
    def reset(self, row, seed): ...
    def step(self, reply, more): ...


class NoTools:
    def reset(self, **row): ...
    def get_reward(self): ...


class StepIsATool:
    def reset(self, **row): ...
    def step(self, reply): ...


class NeedsArguments:
    def __init__(self, url): ...
    def reset(self, row, seed): ...


@pytest.mark.parametrize("brought, said", [
    (5, "it is int 5, and must be a function or a list of functions"), ([], "it is list \\[\\]"),
    ([add, 5], "it is int 5"), ([add, add], r"two of its tools have the same name.*\['add', 'add'\]"),
    (Table(), "it is Table <.*, and must be"),
    (untyped, "the tool `untyped` has no schema: TypeHintParsingException: .*type hint(.|\n)*needs type hints.*\n"
              "  .*def untyped"),
    (undescribed, "`undescribed` has no schema: DocstringParsingException: .*no description for the argument 'a'"),
    (undocumented, "`undocumented` has no schema: DocstringParsingException: .*no docstring"),
    (NoReset, "the class NoReset has no reset"), (NoStep, r"NoStep has reset\(row, seed\), but no step\(reply\)"),
    (WrongStep, "WrongStep.step is called with one argument, the reply, but missing a required argument: 'more'"),
    (NoTools, "NoTools has reset, but no public method that could be a tool"),
    (StepIsATool, r"`step` has no schema.*an environment has reset\(row, seed\), and not reset\(self, \*\*row\)"),
    (NeedsArguments, "NeedsArguments.__init__ requires url; it is called without arguments"),
])
def test_what_has_no_shape_is_refused_with_the_reason(brought, said):
    with pytest.raises(TypeError, match=said):
        recognise(brought)


@pytest.mark.parametrize("call, content, failed", [
    (ToolCall("add", {"a": 2}), "3", False), (ToolCall("add", {"a": 2, "b": 3.0}), None, True),
    (ToolCall("search", {"query": "x", "limits": [1]}), '{"found": "x", "ü": [1]}', False),
    (ToolCall("search", {"query": "x", "limits": None}), '{"found": "x", "ü": null}', False),
    (ToolCall("search", {"query": "nothing"}), "Error: LookupError: found\nnothing", True),
    (ToolCall("search", {"query": "exit"}), "Error: SystemExit: 3", True),
    (ToolCall("sub", {"a": 2}), "Error: there is no tool 'sub'; the tools are add, search", True),
    (ToolCall("add", {}), "Error: add: the argument 'a' is missing", True),
    (ToolCall("add", {"a": 1, "c": 2}), "Error: add: there is no argument 'c'; the arguments are a, b", True),
    (ToolCall("add", {"a": "1"}), "Error: add: the argument 'a' is str '1', and must be {'type': 'integer'}", True),
    (ToolCall("add", {"a": True}), "Error: add: the argument 'a' is bool True, and must be {'type': 'integer'}", True),
    (ToolCall("add", ["a"]), "Error: add: the arguments are list ['a'], and must be an object", True),
    (ToolCall("search", {"query": "x", "limits": ["1"]}), None, True),
])
def test_a_tool_call_gives_its_result_or_an_error_that_the_policy_reads(call, content, failed):
    episode, _ = begin([add, search])
    step = episode.step(Reply("", tool_calls=[call, ToolCall("add", {"a": 1}, "2")]))
    first, second = step["messages"]
    assert step["tool_errors"] == int(failed) and not step["done"]
    assert first["content"] == content if content else first["content"].startswith("Error: ")
    assert second == {"role": "tool", "name": "add", "tool_call_id": "2", "content": "2"}


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EMFILE, "Too many open files")])
def test_a_tool_that_finds_its_process_exhausted_fails_the_step_instead_of_being_read(error):
    def opens() -> str:
        """Opens a file."""
        raise error

    episode, _ = begin(opens)
    with pytest.raises(type(error)):
        episode.step(Reply("", tool_calls=[ToolCall("opens", {})]))


def test_a_turn_without_a_tool_call_ends_the_episode():
    episode, start = begin(add)
    assert start["messages"] is None
    assert episode.step(Reply("the answer is 3"))["done"]


def test_a_tool_that_returns_neither_text_nor_json_is_an_error_of_the_environment():
    def strange() -> object:
        """Returns something."""
        return {1, 2}

    episode, _ = begin(strange)
    with pytest.raises(TypeError, match=r"the result of the tool `strange` is set \{1, 2\}, which JSON cannot hold"):
        episode.step(Reply("", tool_calls=[ToolCall("strange", {})]))


@pytest.mark.parametrize("schema, right, wrong", [
    ({"type": "number"}, [1, 1.5], ["1", True, None]), ({"type": "string", "enum": ["a"]}, ["a"], ["b", 1]),
    ({"type": ["integer", "string"]}, [1, "1"], [1.5]), ({"type": "integer", "nullable": True}, [None, 1], ["1"]),
    ({"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]}, [1, [1]], ["1", ["1"]]),
    ({"type": "object"}, [{}], [[]]), ({}, [1, "1", None], []),
])
def test_arguments_are_checked_by_their_schema(schema, right, wrong):
    parameters = {"properties": {"x": schema}}
    assert not any(arguments_problem(parameters, {"x": value}) for value in right)
    assert all(arguments_problem(parameters, {"x": value}) for value in wrong)


class Answers:
    """A class with tools that are known when it runs."""

    def reset(self, a):
        self.a = a

    @classmethod
    def tool_schemas(cls):
        return [{"type": "function", "function": {"name": "close", "parameters": {"type": "object"}}}]

    async def call_tool(self, name, arguments):
        if "broken" in arguments:
            raise ConnectionError("no server")
        return f"{self.a} {name} {arguments}", "fails" in arguments


def test_a_class_may_say_its_tools_and_answer_their_calls():
    """Arguments are its own affair, and what it raises is no answer: the environment has failed."""
    episode, start = begin(Answers, {"a": 1})
    assert start["tools"] == Answers.tool_schemas()
    step = episode.step(Reply("", tool_calls=[ToolCall("close", {"x": 2}, "1"), ToolCall("close", {"fails": 0}, "2"),
                                              ToolCall("look", {}, "3")]))
    assert [message["content"] for message in step["messages"]] == [
        "1 close {'x': 2}", "1 close {'fails': 0}", "Error: there is no tool 'look'; the tools are close"]
    assert step["tool_errors"] == 2
    with pytest.raises(ConnectionError):
        episode.step(Reply("", tool_calls=[ToolCall("close", {"broken": 1}, "4")]))


def test_an_environment_may_give_its_reward_at_the_end():
    class Judged(Board):
        def get_reward(self):
            return 0.5

    assert begin(Judged, {"a": 1})[0].reward() == 0.5 and begin(Board, {"a": 1})[0].reward() == 0.0


def test_a_start_may_have_text_after_the_prompt():
    class After:
        def reset(self, row, seed):
            return {"observation": row["a"], "messages": row.get("messages")}

        def step(self, reply):
            return {"done": True}

    assert begin(After, {"a": "go"})[1] == {"messages": None, "tools": [], "observation": "go"}
    with pytest.raises(ValueError, match="messages and an observation"):
        begin(After, {"a": "go", "messages": [{"role": "user", "content": "x"}]})
    with pytest.raises(TypeError, match="the observation int 3, which must be text"):
        begin(After, {"a": 3})
