"""The rows that learners are compared on, and what counts as padding in them."""

import numpy as np
import pytest
import torch

from benchmarks import learner_vs_padded
from benchmarks.learner_side import padding_ratio, up_to
from rlhf_ray.records import Experience, SampleKey, offsets_of


def test_the_padding_ratio_by_hand():
    assert padding_ratio(np.array([2, 4, 6])) == 18 / 12


def test_a_response_ends_with_its_first_end_token():
    assert up_to(torch.tensor([5, 1, 7, 1]), end=1) == [5, 1]
    assert up_to(torch.tensor([5, 6]), end=1) == [5, 6]


def test_responses_have_room_up_to_their_limit_and_their_row_s_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(learner_vs_padded, "RESPONSE_TOKENS", 3)
    mask = np.array([[0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 0]], dtype=bool)
    room = learner_vs_padded.response_room(mask)
    assert room.astype(int).reshape(2, 6).tolist() == [[0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1]]


def test_padded_rows_keep_their_tokens_and_optional_columns_stay_absent():
    mask, values = np.array([False, True, False, True, True]), np.arange(5, dtype=np.float32)
    whole = Experience(
        offsets=offsets_of([2, 3]), tokens=np.arange(5, dtype=np.int32), response_mask=mask, behaviour_logprobs=values,
        old_logprobs=values, reference_logprobs=None, values=None, advantages=values, returns=values,
        keys=[SampleKey(0, row, 0) for row in range(2)])
    padded = object.__new__(learner_vs_padded.PaddedLearnerSide).rows(whole)
    assert padded.tokens.reshape(2, 3).tolist() == [[0, 1, 0], [2, 3, 4]]
    assert padded.lengths.tolist() == [3, 3] and padded.values is None and padded.mask_sizes is None
