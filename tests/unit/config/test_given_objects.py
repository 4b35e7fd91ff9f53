"""Functions and rows given as Python objects: what becomes a file that gives the same, and what is refused."""

import functools
import importlib.util
import json
import os.path
import re
import xml.etree.ElementTree as ElementTree
from statistics import mean as average

import numpy as np
import pytest

from rlhf_ray.config.data import PromptsConfig
from rlhf_ray.config.given_objects import GivenFunction, GivenRows, digest
from rlhf_ray.config.load import load
from rlhf_ray.config.rewards import FunctionReward
from rlhf_ray.config.stages import PPOConfig, SFTConfig
from rlhf_ray.errors import ConfigError

LIMIT = 3
TABLE = {"a": 1}


def plain(responses, **_):
    return [float(len(response)) for response in responses]


def annotated(completions: list[str], **kwargs: "NotDefined") -> TABLE:  # noqa: F821
    return [1.0 for _ in completions]


def with_modules(responses, weights=(1, 2)):
    class Count:
        one = 1
        two = one + 1

    found = [len(re.findall("a", response)) for response in responses]
    tree = ElementTree.fromstring("<a/>").tag
    return [average([number, Count.two]) + len(os.path.join(tree, "b")) + float(np.float32(weights[0]))
            for number in found]


async def awaited(responses):
    return [float(len(response)) for response in responses]


def recursive(responses):
    return [0.0] if not responses else [1.0, *recursive(responses[1:])][: len(responses)]


def nested_without_closure():
    def inner(responses):
        return [2.0] * len(responses)

    return inner


def module_of(given, tmp_path):
    """The function, imported from the file that was written."""
    file = tmp_path / "written.py"
    file.write_text(given.text)
    spec = importlib.util.spec_from_file_location("written", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, given.function_name)


@pytest.mark.parametrize("function", [plain, annotated, with_modules, recursive, nested_without_closure()])
def test_the_written_file_has_a_function_that_gives_the_same(function, tmp_path):
    given = FunctionReward(type="function", function=function).function
    assert isinstance(given, GivenFunction)
    written = module_of(given, tmp_path)
    assert written(["banana", "kiwi"]) == function(["banana", "kiwi"]) and written is not function


def test_a_coroutine_function_is_written_too(tmp_path):
    import asyncio

    assert asyncio.run(module_of(GivenFunction.of(awaited), tmp_path)(["abc"])) == [3.0]


def helper(response):
    return len(response)


def uses_global(responses):
    return [float(len(response) > LIMIT) for response in responses]


def uses_two(responses):
    return [helper(response) + TABLE["a"] for response in responses]


def uses_default(responses, limit=LIMIT):
    return [limit] * len(responses)


def uses_inside(responses):
    def one(response):
        return [helper(part) for part in response]

    return [one(response) for response in responses]


def uses_nothing_that_is(responses):
    return [not_defined_anywhere(response) for response in responses]  # noqa: F821


def counts(responses):
    global CALLS
    CALLS += 1
    return [0.0] * len(responses)


def enclosing(limit):
    def uses_closure(responses):
        return [limit] * len(responses)

    return uses_closure


def decorator(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@decorator
def decorated(responses):
    return [0.0] * len(responses)


class Scorer:
    def method(self, responses):
        return [0.0] * len(responses)

    def __call__(self, responses):
        return [0.0] * len(responses)


@pytest.mark.parametrize(("function", "words"), [
    (uses_global, r"the function uses_global uses LIMIT, which is defined outside of it\..*define it inside the"),
    (uses_two, r"the function uses_two uses TABLE, helper, which are defined outside"),
    (uses_default, "uses LIMIT"), (uses_inside, "uses helper"), (uses_nothing_that_is, "uses not_defined_anywhere"),
    (counts, "uses CALLS"), (enclosing(3), "the function uses_closure uses limit"), (decorated, "uses decorator"),
    (lambda responses: [0.0], "got a lambda; define the function by def"),
    (functools.partial(plain), "got partial .*; give a function that is defined by def"),
    (Scorer().method, "got method"), (Scorer(), "got Scorer"), (Scorer, "got type"), (len, "got builtin_function"),
])
def test_a_function_that_would_not_be_the_same_is_refused_by_name(function, words):
    with pytest.raises(ConfigError, match=rf"(?s)rewards\.mine\.function: .*{words}"):
        PPOConfig(model={"path": "m"}, prompts={"path": "p"}, rewards={"mine": function})


def test_a_function_without_source_is_refused():
    space = {}
    exec("def made(responses): return [0.0] * len(responses)", space)
    with pytest.raises(ConfigError, match="the source of made cannot be read .*a file or a notebook"):
        FunctionReward(type="function", function=space["made"])


@pytest.mark.parametrize("given", [
    plain, {"function": plain}, {"type": "function", "function": plain},
    FunctionReward(type="function", function=plain),
])
def test_the_forms_in_which_a_function_is_given(given):
    (reward,) = PPOConfig(model={"path": "m"}, prompts={"path": "p"}, rewards={"mine": given}).rewards.values()
    assert isinstance(reward.function, GivenFunction) and "def plain" in reward.function.text


ROWS = [{"prompt": "a", "answer": 5, "ok": None}, {"prompt": [{"role": "user", "content": "ü"}], "x": [1.5, True]}]


@pytest.mark.parametrize("given", [ROWS, tuple(ROWS), {"path": ROWS}, PromptsConfig(path=ROWS)])
def test_the_forms_in_which_rows_are_given(given):
    rows = PPOConfig(model={"path": "m"}, prompts=given, rewards={"mine": plain}).prompts.path
    assert isinstance(rows, GivenRows) and [json.loads(line) for line in rows.text.splitlines()] == ROWS


def test_a_data_set_is_rows():
    from datasets import Dataset

    table = Dataset.from_list([{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}])
    given = PromptsConfig(path=table).path
    assert [json.loads(line) for line in given.text.splitlines()] == table.to_list()
    sft = SFTConfig(model={"path": "m"}, data=table.rename_column("prompt", "text"))
    assert sft.data.path == "2 rows of a datasets.Dataset"
    assert digest(given) == digest(GivenRows.of(table.to_list())) != digest(GivenRows.of(table.to_list()[:1]))


@pytest.mark.parametrize(("given", "words"), [
    ([], "an empty list was given; it needs at least one row"),
    (["text"], r"row 1 is str 'text'; each row must be a dict of columns"),
    ([{"prompt": "a"}, {"prompt": {1, 2}}], r"row 2: column 'prompt' has set {1, 2}, which JSON does not have"),
    ([{"prompt": "a", "x": [np.float32(1)]}], "row 1: column 'x' has float32 "),
    ([{"prompt": "a", "x": {1: 2}}], "row 1: column 'x' has int 1, which JSON does not have"),
    ([{3: "a"}], "row 1: 3 is no text"),
    (iter([{"prompt": "a"}]), r"got a builtins\.list_iterator; give a path, a list of rows"),
    (5, "prompts.path=5: must be text"),
])
def test_rows_that_no_file_can_have_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        PPOConfig(model={"path": "m"}, prompts={"path": given}, rewards={"mine": plain})


def test_several_splits_are_refused():
    from datasets import Dataset, DatasetDict

    splits = DatasetDict({"train": Dataset.from_list([{"prompt": "a"}])})
    with pytest.raises(ConfigError, match=r"a DatasetDict has several splits \(train\); give one of them, such as"):
        PromptsConfig(path=splits)


def test_rows_in_a_file_of_the_configuration_are_refused(tmp_path):
    (tmp_path / "c.yaml").write_text("model: {path: m}\nprompts: [{prompt: a}]\nrewards: {v: {type: vader}}\n")
    with pytest.raises(ConfigError, match=r"prompts\.path is a list of rows, which can be given from Python only"):
        load(PPOConfig, tmp_path / "c.yaml", [])


def test_all_problems_are_reported_by_our_own_error():
    with pytest.raises(ConfigError) as caught:
        PPOConfig(model={"path": "m"}, prompts={"path": "p", "max_tokns": 3}, rewards={"mine": {"type": "functoin"}},
                  run={"steps": 0})
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()] == [
        "the configuration cannot run", "run.steps=0", "rewards.mine.type='functoin'", "prompts.max_tokns"]
    assert "did you mean max_tokens?" in str(caught.value)


def test_a_configuration_is_not_changed():
    with pytest.raises(ConfigError, match=r"RunConfig\.steps cannot be set to '5': .* make another one"):
        PPOConfig(model={"path": "m"}, prompts={"path": "p"}, rewards={"mine": plain}).run.steps = 5
