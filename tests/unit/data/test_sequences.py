import numpy as np
import pytest

from rlhf_ray.data.sequences import Pairs, Sequences, join_sequences


def test_joined_rows_mask_the_prompt_only():
    s = join_sequences([[5, 6], [], [7]], [[8], [9, 10], []])
    assert s.tokens.tolist() == [5, 6, 8, 9, 10, 7]
    assert s.loss_mask.tolist() == [False, False, True, True, True, False]
    assert s.offsets.tolist() == [0, 3, 5, 6]


def test_pairs_count_both_sides_and_select_row_by_row():
    chosen = join_sequences([[1], [2, 2]], [[3], [4]])
    rejected = join_sequences([[1], [2, 2]], [[5, 5], [6, 6, 6]])
    pairs = Pairs(chosen, rejected)
    assert len(pairs) == 2 and pairs.lengths.tolist() == [5, 8] and pairs.nbytes == chosen.nbytes + rejected.nbytes
    last = pairs.select([1])
    assert (last.chosen.tokens.tolist(), last.rejected.tokens.tolist()) == ([2, 2, 4], [2, 2, 6, 6, 6])


def test_sides_of_different_counts_do_not_pair_up():
    one = Sequences(np.array([0, 1]), np.array([3], dtype=np.int32), np.array([True]))
    with pytest.raises(ValueError, match="2 chosen and 1 rejected"):
        Pairs(Sequences.concat([one, one]), one)
