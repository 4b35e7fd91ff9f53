"""The data of the tools example: its tables, its demonstrations, what is held out."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from rlhf_ray.data import tool_tasks
from rlhf_ray.data.chat import checked_messages, template_options
from rlhf_ray.stages.tools_example import environment_class, tool_schemas
from tests.unit.data.conftest import read_lines

SHOP = environment_class()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tool_tasks.write_tool_tasks(tmp_path_factory.mktemp("tool tasks"), 0, SHOP, tool_schemas(SHOP))


def asked(messages: list[dict[str, Any]]) -> frozenset[str]:
    """The two items of a question."""
    first, second = messages[0]["content"].removeprefix("How much are ").removesuffix("?").split(" and ")
    return frozenset((first, second))


def replay(row: dict[str, Any], messages: list[dict[str, Any]]) -> float:
    """The reward of a conversation's calls in the environment; each answer must be the one that is written."""
    shop = SHOP()
    shop.reset(row["prices"], row["answer"])
    for call, result in zip(messages[1::2], messages[2::2], strict=False):
        function = call["tool_calls"][0]["function"]
        try:
            answer = getattr(shop, function["name"])(**function["arguments"])
            assert (answer if isinstance(answer, str) else json.dumps(answer)) == result["content"]
        except Exception as error:
            assert f"Error: {type(error).__name__}: {error}" == result["content"]
    return shop.get_reward()


def demonstrated(task: tool_tasks.Task, *lapses: bool) -> tuple[list[dict[str, Any]], float]:
    """(a demonstration with these lapses, its reward)."""
    messages = tool_tasks.demonstrate(tool_tasks.Player(SHOP, task), task, iter(lapses))
    return messages, replay(task.columns, messages)


TASK = tool_tasks.Task("plum", "pear", {"plum": 37, "fig": 11, "pear": 21})


def test_a_demonstration_without_a_lapse_solves_its_task_in_five_turns():
    messages, reward = demonstrated(TASK, False, False)
    assert reward == 1.0 and messages[0] == {"role": "user", "content": "How much are plum and pear?"}
    assert [(call["function"]["name"], call["function"]["arguments"], result["content"])
            for call, result in zip((m["tool_calls"][0] for m in messages[1:-1:2]), messages[2::2], strict=True)] == [
        ("lookup", {"item": "plum"}, "37"), ("lookup", {"item": "pear"}, "21"),
        ("calculator", {"expression": "37+21"}, "58"), ("submit", {"answer": 58}, "ok")]
    assert messages[-1] == {"role": "assistant", "content": "Done."}


@pytest.mark.parametrize(("lapses", "submitted"), [
    ((True, False), 74), ((False, True), 21), ((True, True), 37)])
def test_each_lapse_submits_another_number(lapses, submitted):
    messages, reward = demonstrated(TASK, *lapses)
    assert reward == 0.0 and messages[-3]["tool_calls"][0]["function"]["arguments"] == {"answer": submitted}


def test_one_of_seven_demonstrations_is_right(files):
    """0.9 * 0.4 ** 2 = 0.144 of them. The last call submits; it is right if the looked up prices are of the items that
    were asked for, and add up to it."""
    right = 0
    for row in read_lines(files.sft):
        calls = [call["function"]["arguments"] for m in row["messages"] for call in m.get("tool_calls", [])]
        prices = {call["item"]: int(result["content"]) for call, result in zip(
            calls, row["messages"][2::2], strict=True) if "item" in call}
        right += prices.keys() == asked(row["messages"]) and sum(prices.values()) == calls[-1]["answer"]
    assert right / 4000 == pytest.approx(0.9 * 0.4**2, abs=0.02)


def test_demonstrations_are_rows_that_training_reads(files):
    for row in read_lines(files.sft)[:200]:
        assert checked_messages(row["messages"], "row", "messages") == row["messages"]
        assert template_options(row, "row") == {"tools": row["tools"]}
        assert [tool["function"]["name"] for tool in row["tools"]] == ["lookup", "calculator", "submit"]


def test_no_pair_of_items_of_a_held_out_question_is_in_another_file(files):
    held = {asked(row["prompt"]) for row in read_lines(files.eval_prompts)}
    known = {asked(row["prompt"]) for row in read_lines(files.prompts)}
    shown = {asked(row["messages"]) for row in read_lines(files.sft)}
    assert not held & (known | shown) and len(held) >= 40 and len(known) >= 400


def test_a_prompt_says_nothing_of_its_prices_which_differ_from_row_to_row(files):
    rows = [*read_lines(files.prompts), *read_lines(files.eval_prompts)]
    tables = Counter()
    for row in rows:
        assert asked(row["prompt"]) <= row["prices"].keys() and len(row["prices"]) == 6
        assert row["answer"] == sum(row["prices"][item] for item in asked(row["prompt"]))
        assert not any(character.isdigit() for character in row["prompt"][0]["content"])
        tables[json.dumps(row["prices"])] += 1
    assert max(tables.values()) == 1


def test_the_seed_determines_the_files(files, tmp_path):
    again, other = (tool_tasks.write_tool_tasks(tmp_path / str(seed), seed, SHOP, tool_schemas(SHOP), sft=50,
                                                prompts=50, eval_prompts=50) for seed in (0, 1))
    assert again.sft.read_text().splitlines() == files.sft.read_text().splitlines()[:50]
    assert again.sft.read_text() != other.sft.read_text()
