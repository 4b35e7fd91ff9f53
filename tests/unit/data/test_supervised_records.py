import numpy as np
import pytest

from rlhf_ray.data.supervised_records import Pairs, Sequences, sequences_of


def rows_of(*rows):
    return sequences_of([(tokens, [False] * masked + [True] * (len(tokens) - masked)) for tokens, masked in rows])


def test_encoded_rows_lie_end_to_end_with_their_masks():
    s = rows_of(([5, 6, 8], 2), ([9, 10], 0), ([7], 1))
    assert s.tokens.tolist() == [5, 6, 8, 9, 10, 7]
    assert s.loss_mask.tolist() == [False, False, True, True, True, False]
    assert s.offsets.tolist() == [0, 3, 5, 6]


def test_pairs_count_both_sides_and_select_row_by_row():
    chosen = rows_of(([1, 3], 1), ([2, 2, 4], 2))
    rejected = rows_of(([1, 5, 5], 1), ([2, 2, 6, 6, 6], 2))
    pairs = Pairs(chosen, rejected)
    assert len(pairs) == 2 and pairs.lengths.tolist() == [5, 8]
    last = pairs.select([1])
    assert (last.chosen.tokens.tolist(), last.rejected.tokens.tolist()) == ([2, 2, 4], [2, 2, 6, 6, 6])


def test_sides_of_different_counts_do_not_pair_up():
    one = Sequences(np.array([0, 1]), np.array([3], dtype=np.int32), np.array([True]))
    with pytest.raises(ValueError, match="2 chosen and 1 rejected"):
        Pairs(Sequences.concat([one, one]), one)
