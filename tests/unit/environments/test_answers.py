"""Which answers of user code are taken, and what is said of the others."""

import json
import math
from decimal import Decimal

import numpy as np
import pytest

from rlhf_ray.environments.answers import (
    MOST_NESTED,
    given_snapshot,
    plain_reward,
    plain_snapshot,
    plain_start,
    plain_step,
    tool_content,
)
from rlhf_ray.environments.protocol import Start, Step

SAYS = {"role": "user", "content": "go on"}
NOTHING = {"messages": [], "reward": 0.0, "done": True, "truncated": False, "info": {}, "tool_errors": 0}


@pytest.mark.parametrize("answer, expected", [
    (Step(done=True), NOTHING), ({"done": True}, NOTHING), (([], 0, True, False, {}), NOTHING),
    (Step([SAYS], 1), {**NOTHING, "messages": [SAYS], "reward": 1.0, "done": False}),
    ({"truncated": np.bool_(True), "reward": np.float32(0.5)}, {**NOTHING, "reward": 0.5, "done": False,
                                                               "truncated": True}),
    (([SAYS], Decimal("0.5"), False, False, {"a": np.int64(3), "b": True, "c": "text", "d": [1], "e": None}),
     {**NOTHING, "messages": [SAYS], "reward": 0.5, "done": False, "info": {"a": 3.0, "b": 1.0}}),
    (Step([SAYS], tool_errors=2), {**NOTHING, "messages": [SAYS], "done": False, "tool_errors": 2}),
])
def test_a_step_may_be_a_step_a_dict_or_a_tuple(answer, expected):
    assert plain_step(answer) == expected


@pytest.mark.parametrize("answer, said", [
    (None, "step returned NoneType None; it must return a Step, a dict with its keys"),
    ("text", "step returned str 'text'"), (([SAYS], 1.0), "step returned tuple"),
    (Start([SAYS]), "step returned Start"),
    ({"observation": "x"}, "a dict with the key str 'observation'; the keys of a Step are messages, reward, done"),
    ({"done": 1}, "done=int 1, which must be True or False"), ({"done": None}, "done=NoneType None"),
    ({"messages": "x"}, "the messages str 'x', which must be a list"),
    ({"messages": ["x"]}, "message 0 of step is str 'x', which must be a dict with role and content"),
    ({"messages": [SAYS, {"content": "x"}]}, "message 1 of step is dict"),
    ({"messages": [{"role": "user"}]}, "the content of message 0 of step is NoneType None, which must be text"),
    ({"messages": [{**SAYS, "x": {1}}]}, "message 0 of step is dict .*, which JSON cannot hold"),
    ({"messages": []}, "step returned no messages, although the episode is not done"), ({}, "no messages"),
    ({"done": True, "reward": None}, "the reward NoneType None, which must be a number"),
    ({"done": True, "reward": "1"}, "the reward str '1', which must be a number"),
    ({"done": True, "reward": math.nan}, "the reward nan, which must be finite"),
    ({"done": True, "reward": -math.inf}, "the reward -inf, which must be finite"),
    ({"done": True, "reward": 1e39}, r"the reward 1e\+39, which must be finite \(at most 1e\+30\)"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "which JSON cannot hold.*surrogates not allowed"),
    ({"done": True, "reward": np.ones(2)}, "the reward ndarray"),
    ({"done": True, "info": 3}, "info=int 3, which must be a dict"),
    ({"done": True, "tool_errors": -1}, "tool_errors=int -1"),
])
def test_another_step_is_refused_with_its_value(answer, said):
    with pytest.raises((TypeError, ValueError), match=said):
        plain_step(answer)


@pytest.mark.parametrize("answer, messages", [
    (Start(), None), (Start([SAYS]), [SAYS]), ({}, None), ({"messages": (SAYS,)}, [SAYS]),
    (Start([{"role": "assistant", "tool_calls": [{}]}]), [{"role": "assistant", "tool_calls": [{}]}]),
])
def test_a_start_may_be_a_start_or_a_dict(answer, messages):
    assert plain_start(answer) == {"messages": messages, "tools": [], "observation": ""}


@pytest.mark.parametrize("answer, said", [
    (None, "reset returned NoneType None; it must return a Start"), ([SAYS], "reset returned list"),
    (({}, {}), "reset returned tuple"), (Start([]), "reset returned no messages"), (Start("x"), "the messages str 'x'"),
    (Start(tools="x"), "the tools str 'x'"), (Start(tools=[{"name": "f"}]), "tool 0 of reset is dict"),
    (Start(tools=[{"function": {"name": "f", "x": {1}}}]), "tool 0 of reset is dict .*, which JSON cannot hold"),
])
def test_another_start_is_refused_with_its_value(answer, said):
    with pytest.raises((TypeError, ValueError), match=said):
        plain_start(answer)


def test_a_value_whose_class_raises_is_refused_like_any_other():
    class Worst:
        def __repr__(self):
            raise RuntimeError

        def __float__(self):
            raise KeyError

    with pytest.raises(TypeError, match=r"the reward Worst \(its text cannot be read\)"):
        plain_reward(Worst(), "get_reward")
    with pytest.raises(TypeError, match="step returned Worst"):
        plain_step(Worst())


def nested(levels, kind):
    """So many lists or dicts within each other."""
    value = kind()
    for _ in range(levels - 1):
        value = {"a": value, "b": 1} if kind is dict else [1, value]
    return value


@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize("of", [
    lambda value: plain_step({"messages": [{**SAYS, "x": value}]}),
    lambda value: plain_start(Start([{**SAYS, "x": value}])),
    lambda value: plain_start(Start([SAYS], tools=[{"function": {"name": "f"}, "x": value}])),
    lambda value: plain_snapshot({"x": value}),
])
def test_what_is_nested_too_deep_is_refused(of, kind):
    of(nested(MOST_NESTED - 1, kind))  # the message, tool or snapshot is one more
    wide = [nested(3, kind) for _ in range(MOST_NESTED)]
    of(wide)
    for levels in (MOST_NESTED, 900, 985, 5000):
        with pytest.raises(ValueError, match="with more than 100 lists and dicts within each other; return it flatter"):
            of(nested(levels, kind))


def test_the_result_of_a_tool_is_text_as_it_is_or_json():
    assert [tool_content(value, "f") for value in ("a\nb", 3, None, {"ü": [1.5]}, True)] == [
        "a\nb", "3", "null", '{"ü": [1.5]}', "true"]


@pytest.mark.parametrize("value, plain", [
    (None, {"json": None}), ({"a": [1, 2.5, "ü", None, True]}, {"json": {"a": [1, 2.5, "ü", None, True]}}),
    (b"ab", {"base64": "YWI="}), (bytearray(b""), {"base64": ""}),
    ({"base64": "YWI="}, {"json": {"base64": "YWI="}}), (np.float64(0.5), {"json": 0.5}),
])
def test_a_snapshot_is_restored_as_it_was_given(value, plain):
    assert plain_snapshot(value) == plain
    given = given_snapshot(json.loads(json.dumps(plain)))
    assert given == value and (type(given) is bytes) == ("base64" in plain)


@pytest.mark.parametrize("value, said", [
    ((1, 2), r"snapshot returned tuple \(1, 2\), which JSON gives back changed \(tuples become lists, and keys text\)"),
    ({1: 2}, r"snapshot returned dict \{1: 2\}, which JSON gives back changed"),
    ([math.nan], r"snapshot returned list \[nan\], which JSON gives back changed.*finite numbers"),
    ({1, 2}, r"the result of snapshot is set \{1, 2\}, which JSON cannot hold"),
    (Start(), r"the result of snapshot is Start .*, which JSON cannot hold"),
    ("x" * (1 << 24), r"snapshot returned str of 16777218 bytes as JSON .*, and may have 16777216"),
    (b"x" * (3 << 22), None), (b"x" * ((3 << 22) + 1), r"snapshot returned bytes of 16777220 bytes as JSON"),
])
def test_another_snapshot_is_refused_with_its_value(value, said):
    if said is None:  # 4 bytes of base64 for 3
        assert len(plain_snapshot(value)["base64"]) == 1 << 24
        return
    with pytest.raises((TypeError, ValueError), match=said):
        plain_snapshot(value)
