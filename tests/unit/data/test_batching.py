from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_ray.data.batching import balanced_partition, micro_batches, rank_plan
from rlhf_ray.errors import ConfigError

LENGTHS = st.lists(st.integers(1, 64), max_size=120)


def all_rows(parts) -> list[int]:
    return sorted(int(row) for part in parts for row in part)


def cost(batch: np.ndarray, lengths: np.ndarray) -> int:
    return len(batch) * int(lengths[batch].max())


def test_a_partition_by_hand():
    # 9 | 7 | then 5 to the lighter (7+5=12), 4 to the lighter (9+4=13), 3 to the lighter (12+3=15)
    assert [p.tolist() for p in balanced_partition([3, 9, 4, 7, 5], 2)] == [[1, 2], [0, 3, 4]]


@given(lengths=LENGTHS, parts=st.integers(1, 9))
def test_partition_holds_every_row_once_and_is_balanced(lengths: list[int], parts: int):
    shares = balanced_partition(lengths, parts)
    assert len(shares) == parts and all_rows(shares) == list(range(len(lengths)))
    assert all(np.all(np.diff(share) > 0) for share in shares)
    assert min(map(len, shares)) > 0 or len(lengths) < parts
    totals = [sum(lengths[i] for i in share) for share in shares]
    assert max(totals) - min(totals) <= max(lengths, default=0)


def test_rows_without_tokens_still_spread_over_all_parts():
    assert [len(p) for p in balanced_partition([0, 0, 0, 0], 2)] == [2, 2]


def test_micro_batches_by_hand():
    # Filled to the brim: 8 7 | 4 3 3 2 | 1, at costs 16, 16 and 1. A budget of 14 needs three as well: 8, 14 and 12.
    lengths = np.array([3, 8, 1, 4, 7, 2, 3])
    batches = micro_batches(lengths, 16)
    assert [lengths[b].tolist() for b in batches] == [[8], [7, 4], [3, 3, 2, 1]]


def test_micro_batches_are_evened_out():
    assert [len(b) for b in micro_batches([10] * 8, 70)] == [4, 4]  # not 7 and 1


@given(lengths=LENGTHS, max_tokens=st.integers(64, 400))
def test_micro_batches_hold_every_row_once_within_the_budget(lengths: list[int], max_tokens: int):
    sizes = np.array(lengths, dtype=np.int64)
    batches = micro_batches(lengths, max_tokens)
    assert all_rows(batches) == list(range(len(lengths)))
    assert all(0 < cost(b, sizes) <= max_tokens for b in batches)
    assert all(sizes[a].min() >= sizes[b].max() for a, b in pairwise(batches))


def test_a_row_that_fits_in_no_micro_batch_is_named():
    with pytest.raises(ConfigError, match=r"row 1 has 9 tokens .* micro-batch of 8; raise .* to at least 9"):
        micro_batches([3, 9], 8)


@given(lengths=LENGTHS, ranks=st.integers(1, 5), max_tokens=st.integers(64, 300))
def test_ranks_get_equally_many_micro_batches_and_every_row_once(lengths: list[int], ranks: int, max_tokens: int):
    sizes = np.array(lengths, dtype=np.int64)
    plan = rank_plan(lengths, ranks, max_tokens)
    assert len(plan) == ranks and len({len(batches) for batches in plan}) == 1
    assert all_rows(b for batches in plan for b in batches) == list(range(len(lengths)))
    for batches in plan:
        assert all(cost(b, sizes) <= max_tokens for b in batches if len(b))
        empty = [b for b in batches if not len(b)]
        assert not empty or sum(map(len, batches)) == len(batches) - len(empty)  # only when all others hold one row
        assert not empty or not len(batches[-1])


def test_a_rank_with_too_few_rows_gets_empty_micro_batches_last():
    plan = rank_plan([60, 60, 31, 31, 31], 2, 64)  # shares 60+31+31 and 60+31
    assert [[b.tolist() for b in batches] for batches in plan] == [[[0], [2, 4]], [[1], [3]]]
    assert [[len(b) for b in batches] for batches in rank_plan([60], 2, 64)] == [[1], [0]]


def test_plans_are_deterministic():
    lengths = np.random.default_rng(0).integers(1, 50, 200)
    first, second = rank_plan(lengths, 3, 256), rank_plan(lengths.tolist(), 3, 256)
    assert [[b.tolist() for b in r] for r in first] == [[b.tolist() for b in r] for r in second]
