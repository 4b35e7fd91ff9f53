"""Labelled workings of sums: labels by hand, soft labels against pupils who go on, files that follow from the seed."""

from __future__ import annotations

import json
import random

import pytest

from rlhf_ray.data.arithmetic import DIGITS, FORGETFULNESS, Sum, make_sums, work_out
from rlhf_ray.data.arithmetic_steps import attempt, hard_labels, right_share, right_steps, soft_labels, write_steps

CARRIES = Sum(576, 427)


def test_hard_labels_by_hand():
    assert right_steps(CARRIES) == ["6+7+0=13", "7+2+1=10", "5+4+1=10", "1003"]
    forgotten = ["6+7+0=13", "7+2+0=09", "5+4+0=09", "993"]
    assert hard_labels(CARRIES, forgotten) == [True, False, False, False]
    assert hard_labels(CARRIES, [*right_steps(CARRIES), "1003"]) == [True, True, True, True, False]


def test_soft_labels_by_hand():
    chance = 1 - FORGETFULNESS
    assert soft_labels(CARRIES, right_steps(CARRIES)) == pytest.approx([chance**2, chance, 1, 1])
    assert soft_labels(CARRIES, ["6+7+0=13", "7+2+0=09", "5+4+1=10", "1003"]) == pytest.approx([chance**2, 0, 0, 0])
    assert soft_labels(Sum(220, 676), ["0+6+0=06"]) == [1.0]


def test_soft_labels_are_how_often_a_pupil_arrives_from_there():
    rng, arrived = random.Random(3), 0
    for _ in range(4000):  # after the first column, which cannot be wrong
        lapses = [rng.random() < FORGETFULNESS for _ in range(DIGITS)]
        arrived += work_out(CARRIES, lapses).split()[-1] == "1003"
    assert arrived / 4000 == pytest.approx(soft_labels(CARRIES, right_steps(CARRIES))[0], abs=0.015)


def test_attempts_are_often_right_and_often_wrong_in_every_place():
    rng = random.Random(0)
    labels = [hard_labels(CARRIES, attempt(rng, CARRIES)) for _ in range(500)]
    for place in range(1, DIGITS + 1):
        assert 0.1 < sum(row[place] for row in labels) / 500 < 0.9


def test_the_share_of_right_steps_counts_what_is_missing_and_what_is_too_much():
    right = " ".join(right_steps(CARRIES))
    responses = [right, "6+7+0=13 7+2+0=09 5+4+0=09 993", "6+7+0=13", f"{right} 1003", ""]
    assert right_share([CARRIES.prompt] * 5, responses) == [1, 0.25, 0.25, 0.8, 0]


def test_files_follow_from_the_seed_and_hold_the_same_workings(tmp_path):
    sums = list(make_sums(30, 0))
    files = [write_steps(tmp_path / name, sums, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    texts = [[path.read_text() for path in pair] for pair in files]
    assert texts[0] == texts[1] and texts[0] != texts[2]
    hard, soft = ([json.loads(line) for line in text.splitlines()] for text in texts[0])
    assert len(hard) == 30
    assert [row["steps"] for row in hard] == [row["steps"] for row in soft]
    assert all(isinstance(label, bool) for row in hard for label in row["labels"])
    assert any(0 < label < 1 for row in soft for label in row["labels"])
