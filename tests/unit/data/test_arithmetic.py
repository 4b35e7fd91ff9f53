"""Sums with forgotten carries: what the pupils write, what is right, and that no sum is in two files."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from rlhf_ray.data.arithmetic import (
    FORGETFULNESS,
    ArithmeticFiles,
    Sum,
    demonstrate,
    make_sums,
    work_out,
    write_arithmetic,
)
from rlhf_ray.errors import DataError

FILES = ("sft", "prompts", "eval_prompts")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> ArithmeticFiles:
    return write_arithmetic(tmp_path_factory.mktemp("arithmetic"), seed=0)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("forgets", "work"), [
    ((False, False), "8+7+0=15 5+6+1=12 3+4+1=08 825"),
    ((True, False), "8+7+0=15 5+6+0=11 3+4+1=08 815"),
    ((False, True), "8+7+0=15 5+6+1=12 3+4+0=07 725"),
    ((True, True), "8+7+0=15 5+6+0=11 3+4+0=07 715"),
])
def test_a_forgotten_carry_is_missing_in_the_next_column(forgets, work):
    assert work_out(Sum(358, 467), forgets) == work


def test_without_a_carry_nothing_can_be_forgotten():
    assert {work_out(Sum(123, 456), (a, b)) for a in (True, False) for b in (True, False)} == {
        "3+6+0=09 2+5+0=07 1+4+0=05 579"}


def test_the_last_columns_carry_is_written_down():
    assert work_out(Sum(999, 999), (False, False)).endswith(" 1998")


def test_whoever_forgets_nothing_is_right():
    for problem in make_sums(2_000, seed=3):
        assert work_out(problem, (False, False)).rpartition(" ")[2] == problem.answer == str(problem.a + problem.b)


def test_pupils_are_right_as_often_as_forgetfulness_allows():
    # A carry is due with chance 0.45 out of the units; out of the tens a little more often where one came in.
    rng, problems = random.Random(0), list(make_sums(8_000, seed=1))
    carries = [(s.a % 10 + s.b % 10 > 9) + (s.a % 100 + s.b % 100 > 99) for s in problems]
    right = sum(demonstrate(rng, s).rpartition(" ")[2] == s.answer for s in problems) / len(problems)
    expected = sum((1 - FORGETFULNESS) ** n for n in carries) / len(problems)
    assert right == pytest.approx(expected, abs=0.02)
    assert 0.3 < right < 0.5
    assert sum(n > 0 for n in carries) / len(carries) > 0.65, "sums that the likeliest demonstration gets wrong"


def test_files_have_the_counts_and_columns_asked_for(files):
    rows = {name: read_lines(getattr(files, name)) for name in FILES}
    assert {name: len(found) for name, found in rows.items()} == {
        "sft": 40_000, "prompts": 8_000, "eval_prompts": 1_024}
    assert {tuple(row) for row in rows["sft"]} == {("prompt", "response")}
    assert {tuple(row) for name in FILES[1:] for row in rows[name]} == {("prompt", "answer")}
    assert all(re.fullmatch(r"[1-9]\d\d\+[1-9]\d\d=", row["prompt"]) for name in FILES for row in rows[name])


def test_no_sum_is_in_two_files_or_twice_in_one(files):
    prompts = [row["prompt"] for name in FILES for row in read_lines(getattr(files, name))]
    assert len(set(prompts)) == len(prompts) == 49_024


def test_answers_are_right(files):
    for row in (row for name in FILES[1:] for row in read_lines(getattr(files, name))):
        a, b = map(int, row["prompt"].removesuffix("=").split("+"))
        assert row["answer"] == str(a + b) and 100 <= a <= 999 and 100 <= b <= 999


def test_the_same_seed_writes_the_same_bytes(files, tmp_path):
    again, other = write_arithmetic(tmp_path / "again", seed=0), write_arithmetic(tmp_path / "other", seed=1)
    for name in FILES:
        assert getattr(again, name).read_bytes() == getattr(files, name).read_bytes()
        assert getattr(other, name).read_bytes() != getattr(files, name).read_bytes()


def test_more_sums_than_there_are_is_an_error():
    with pytest.raises(DataError, match="only 810000 sums of 3-digit numbers, not 810001"):
        next(make_sums(810_001, seed=0))
