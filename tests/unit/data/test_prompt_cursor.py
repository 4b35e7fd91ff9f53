import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.errors import CheckpointError, DataError


def test_every_epoch_visits_every_row_once_in_an_order_of_its_own():
    cursor = PromptCursor(50, seed=3, shuffle=True)
    epochs = [cursor.next(50) for _ in range(3)]
    for number, pairs in enumerate(epochs):
        assert {epoch for epoch, _ in pairs} == {number}
        assert sorted(row for _, row in pairs) == list(range(50))
    orders = [[row for _, row in pairs] for pairs in epochs]
    assert orders[0] != orders[1] != orders[2] and orders[0] != list(range(50))


def test_a_batch_crosses_epoch_ends_without_dropping_the_tail():
    cursor = PromptCursor(3, seed=0, shuffle=False)
    assert cursor.next(2) == [(0, 0), (0, 1)]
    assert cursor.next(5) == [(0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert cursor.next(0) == []
    assert cursor.next(1) == [(2, 1)]


def test_the_order_is_the_same_everywhere_and_follows_the_seed():
    assert [row for _, row in PromptCursor(8, seed=0, shuffle=True).next(8)] == [0, 3, 7, 5, 1, 2, 6, 4]
    assert PromptCursor(8, 0, True).next(8) != PromptCursor(8, 1, True).next(8)


@settings(deadline=None)
@given(rows=st.integers(1, 30), batches=st.lists(st.integers(0, 40), max_size=8), cut=st.integers(0, 8),
       shuffle=st.booleans())
def test_a_resumed_cursor_goes_on_as_the_uninterrupted_one(rows: int, batches: list[int], cut: int, shuffle: bool):
    whole = PromptCursor(rows, 7, shuffle)
    expected = [whole.next(n) for n in batches]
    first = PromptCursor(rows, 7, shuffle)
    got = [first.next(n) for n in batches[:cut]]
    resumed = PromptCursor(rows, 7, shuffle)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert got + [resumed.next(n) for n in batches[cut:]] == expected
    assert resumed.state_dict() == whole.state_dict()


@pytest.mark.parametrize(("name", "theirs"), [("rows", [11]), ("seed", 5), ("shuffle", False), ("weights", [2])])
def test_a_state_of_another_data_set_or_seed_is_refused(name: str, theirs):
    state = {**PromptCursor(10, 4, True).state_dict(), name: theirs}
    with pytest.raises(CheckpointError, match=f"has {name}={str(theirs).strip('[]')}, this run {name}="):
        PromptCursor(10, 4, True).load_state_dict(state)


@pytest.mark.parametrize("damage", [{"visited": [-1]}, {"visited": [1, 2]}, {"visited": []}, {"extra": 1}])
def test_a_damaged_state_is_refused(damage: dict[str, Any]):
    with pytest.raises(CheckpointError):
        PromptCursor(10, 4, True).load_state_dict({**PromptCursor(10, 4, True).state_dict(), **damage})


SIZES, WEIGHTS = [3, 10, 5], [2.0, 1.0, 0.5]


def source_of(row: int) -> int:
    """Which of SIZES a row is from."""
    return 0 if row < 3 else 1 if row < 13 else 2


def test_sources_are_visited_by_weight_each_in_epochs_of_its_own():
    pairs = PromptCursor(SIZES, 3, True, WEIGHTS).next(70)
    by_source = [[pair for pair in pairs if source_of(pair[1]) == i] for i in range(3)]
    assert [len(visited) for visited in by_source] == [40, 20, 10], "70 turns at 2 : 1 : 0.5"
    for visited, first, size in zip(by_source, (0, 3, 13), SIZES, strict=True):
        assert [epoch for epoch, _ in visited] == [n // size for n in range(len(visited))]
        for epoch in range(len(visited) // size):
            assert sorted(row for e, row in visited if e == epoch) == list(range(first, first + size))
    assert len(set(pairs)) == len(pairs), "a sample's name never comes twice"


def test_the_order_of_a_source_is_its_own_and_the_first_ones_is_as_without_a_mix():
    pairs = PromptCursor([8, 8], 0, True, [1, 1]).next(16)
    first, second = ([row % 8 for _, row in pairs if row // 8 == i] for i in range(2))
    assert first == [0, 3, 7, 5, 1, 2, 6, 4] != second


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), cut=st.integers(0, 6), shuffle=st.booleans(),
       batches=st.lists(st.integers(0, 25), max_size=6), data=st.data())
def test_a_resumed_mix_goes_on_as_the_uninterrupted_one(sizes, cut, shuffle, batches, data):
    weights = data.draw(st.lists(st.sampled_from([0.25, 1.0, 1.5, 7.0]), min_size=len(sizes), max_size=len(sizes)))
    whole, first, resumed = (PromptCursor(sizes, 7, shuffle, weights) for _ in range(3))
    expected = [whole.next(n) for n in batches]
    got = [first.next(n) for n in batches[:cut]]
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert got + [resumed.next(n) for n in batches[cut:]] == expected
    assert len({pair for batch in expected for pair in batch}) == sum(batches)


def test_a_mix_of_other_weights_is_refused():
    state = PromptCursor(SIZES, 3, True, WEIGHTS).state_dict()
    with pytest.raises(CheckpointError, match=r"has weights=\[2.0, 1.0, 0.5\], this run weights=\[1, 1, 1\]"):
        PromptCursor(SIZES, 3, True, [1, 1, 1]).load_state_dict(state)


def test_a_million_rows_cost_an_order_of_them_and_no_object_a_row():
    tracemalloc.start()
    cursor = PromptCursor([10**6, 10**6], 0, True, [1, 3])
    assert len(cursor.next(1000)) == 1000
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2 * 2 * 10**6 * 8


def test_no_rows_is_an_error():
    with pytest.raises(DataError, match="cannot visit 0 rows"):
        PromptCursor(0, 0, True)
    with pytest.raises(DataError, match=r"cannot visit \[4, 0\] rows"):
        PromptCursor([4, 0], 0, True, [1, 1])


def test_looking_ahead_changes_nothing():
    cursor, other = PromptCursor([5, 3], 7, shuffle=True, weights=[2, 1]), PromptCursor([5, 3], 7, True, [2, 1])
    for count in (4, 1, 9):
        ahead = cursor.peek(count + 6)
        drawn = cursor.next(count)
        assert ahead[:count] == drawn == other.next(count)
    assert cursor.state_dict() == other.state_dict()


def test_a_data_set_whose_rows_changed_is_refused_by_name_and_one_that_moved_is_not():
    state = PromptCursor([5, 3], 7, True, [1, 1], [["a.jsonl", "1f"], ["b.jsonl", "2f"]]).state_dict()
    PromptCursor([5, 3], 7, True, [1, 1], [["a.jsonl", "1f"], ["elsewhere/b.jsonl", "2f"]]).load_state_dict(state)
    for contents, words in (([["a.jsonl", "1f"], ["b.jsonl", "3f"]], r"the rows of b\.jsonl are not .*2f then, 3f now"),
                            ([["a.jsonl", "1f"], ["c.jsonl", "3f"]], r"of c\.jsonl \(then b\.jsonl\)")):
        with pytest.raises(CheckpointError, match=words):
            PromptCursor([5, 3], 7, True, [1, 1], contents).load_state_dict(state)
