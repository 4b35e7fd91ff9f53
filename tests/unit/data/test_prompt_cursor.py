import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_ray.data.prompts import PromptCursor
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
    assert cursor.epoch == 2


def test_the_order_is_the_same_everywhere_and_follows_the_seed():
    assert [row for _, row in PromptCursor(8, seed=0, shuffle=True).next(8)] == [0, 3, 7, 5, 1, 2, 6, 4]
    assert PromptCursor(8, 0, True).next(8) != PromptCursor(8, 1, True).next(8)


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


@pytest.mark.parametrize(("name", "theirs"), [("rows", 11), ("seed", 5), ("shuffle", False)])
def test_a_state_of_another_data_set_or_seed_is_refused(name: str, theirs):
    state = {**PromptCursor(10, 4, True).state_dict(), name: theirs}
    with pytest.raises(CheckpointError, match=f"has {name}={theirs}, this run {name}="):
        PromptCursor(10, 4, True).load_state_dict(state)


@pytest.mark.parametrize("damage", [{"epoch": -1}, {"position": 10}, {"position": -1}, {"extra": 1}])
def test_a_damaged_state_is_refused(damage: dict[str, int]):
    with pytest.raises(CheckpointError):
        PromptCursor(10, 4, True).load_state_dict({**PromptCursor(10, 4, True).state_dict(), **damage})


def test_no_rows_is_an_error():
    with pytest.raises(DataError, match="cannot visit 0 rows"):
        PromptCursor(0, 0, True)
