"""Rows as tensors, and the plans that share a record out among ranks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_ray.data.batching import inference_plan
from rlhf_ray.records import Ragged, TokenScores, offsets_of
from rlhf_ray.roles.micro_batch import AverageMeter, MicroBatch, score_columns, share_of


def test_response_tokens_by_hand(rollout):
    micro = MicroBatch(rollout, "cpu")
    assert micro.predicted.tolist() == [2, 3, 4, 6, 7, 9, 12, 13]
    assert micro.responses.lengths.tolist() == [3, 2, 3]
    assert micro.packing.lengths.tolist() == [5, 3, 6]
    assert micro.tokens.tolist() == rollout.tokens.tolist() and micro.tokens.dtype == torch.int64
    assert micro.mask.int().tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize(("sizes", "listed", "only"), [
    ([1, 2, 1, 1, 1, 1, 2, 1], [[0, -1], [1, 2], [3, -1], [4, -1], [5, -1], [6, -1], [7, 8], [9, -1]], True),
    ([1] * 8, [[token] for token in range(8)], True),
    ([-2, 0, 0, -2, 0, -2, 0, 0], [[0, 1], [-1, -1], [-1, -1], [2, 3], [-1, -1], [4, 5], [-1, -1], [-1, -1]], False),
])
def test_sampling_masks_by_hand(rollout, sizes, listed, only):
    per_token = np.zeros(len(rollout.tokens), np.int32)
    per_token[rollout.response_mask] = sizes
    tokens = np.arange(sum(map(abs, sizes)), dtype=np.int32)
    mask = MicroBatch(replace(rollout, mask_sizes=per_token, mask_tokens=tokens), "cpu").sampling_mask
    assert mask.listed.tolist() == listed and mask.only is only


def test_without_masks_and_where_none_lists_a_token_there_is_none(rollout):
    assert MicroBatch(rollout, "cpu").sampling_mask is None
    nothing = replace(rollout, mask_sizes=np.zeros(len(rollout.tokens), np.int32), mask_tokens=np.zeros(0, np.int32))
    assert MicroBatch(nothing, "cpu").sampling_mask is None


def test_grids_hold_the_response_side_by_side_without_its_gaps(rollout):
    grid = MicroBatch(rollout, "cpu").grid("logprobs")
    p = rollout.logprobs.tolist()
    assert grid.tolist() == [[p[2], p[3], p[4]], [p[6], p[7], 0], [p[9], p[12], p[13]]]


def test_lay_out_takes_numbers_at_response_tokens(rollout):
    flat = torch.arange(1.0, 9.0, requires_grad=True)
    cells = MicroBatch(rollout, "cpu").lay_out(flat)
    assert cells.tolist() == [[1, 2, 3], [4, 5, 0], [6, 7, 8]]
    cells.sum().backward()
    assert flat.grad.tolist() == [1] * 8


def test_scores_land_at_their_tokens_and_nowhere_else(rollout):
    plan = [np.array([2, 0]), np.array([1])]
    (scores,) = score_columns(rollout, plan, "cpu", lambda micro: [100.0 + micro.tokens[micro.predicted]])
    assert scores.values.dtype == np.float32
    assert scores.values.tolist() == np.where(rollout.response_mask, 100.0 + rollout.tokens, 0).tolist()
    assert scores.offsets.tolist() == rollout.offsets.tolist()


def test_rows_outside_the_plan_keep_zeros(rollout):
    (scores,) = score_columns(rollout, [np.array([1])], "cpu", lambda micro: [torch.ones(len(micro.predicted))])
    assert scores.values.tolist() == [0] * 6 + [1, 1] + [0] * 6


def record(lengths):
    return Ragged(offsets=offsets_of(lengths))


@settings(deadline=None, max_examples=60)
@given(lengths=st.lists(st.integers(1, 20), max_size=12), world=st.integers(1, 3), budget=st.integers(20, 60),
       lockstep=st.booleans())
def test_the_ranks_shares_put_together_are_the_whole(lengths, world, budget, lockstep):
    """Every rank scores its plan; the shares, in rank order, hold every row once and in place."""
    tokens = int(sum(lengths))
    values = np.arange(1, tokens + 1, dtype=np.float32)
    offsets, shares = offsets_of(lengths), []
    for rank in range(world):
        done = np.zeros_like(values)
        for rows in inference_plan(lengths, budget, rank, world, lockstep and len(lengths) > 0):
            assert len(rows) * max(np.array(lengths)[rows]) <= budget
            for row in rows:
                done[offsets[row] : offsets[row + 1]] = values[offsets[row] : offsets[row + 1]]
        shares.append(share_of(TokenScores(offsets=offsets, values=done), rank, world))
    whole = TokenScores.concat(shares)
    assert whole.values.tolist() == values.tolist()
    assert whole.offsets.tolist() == offsets.tolist()


@settings(deadline=None, max_examples=60)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=12), world=st.integers(1, 3))
def test_in_lockstep_every_rank_makes_as_many_forward_passes(lengths, world):
    counts = [len(inference_plan(lengths, 24, rank, world, lockstep=True)) for rank in range(world)]
    assert len(set(counts)) == 1
    alone = [len(inference_plan(lengths, 24, rank, world)) for rank in range(world)]
    assert counts[0] == max(alone)


def test_a_rank_that_is_short_repeats_its_own_rows_or_borrows_the_first():
    plans = [inference_plan([8, 8, 2, 2], 8, rank, 2, lockstep=True) for rank in (0, 1)]
    assert [[rows.tolist() for rows in plan] for plan in plans] == [[[0], [1]], [[2, 3], [2, 3]]]
    assert [rows.tolist() for rows in inference_plan([5], 8, 1, 2, lockstep=True)] == [[0]]
    assert inference_plan([5], 8, 1, 2) == []


@pytest.mark.parametrize("rank, rows", [(0, [0, 1]), (1, [2])])
def test_shares_are_contiguous(rollout, rank, rows):
    scores = TokenScores(offsets=rollout.offsets, values=rollout.logprobs)
    share = share_of(scores, rank, 2)
    assert share.lengths.tolist() == rollout.lengths[rows].tolist()
    assert share.values.tolist() == scores.select(rows).values.tolist()


def test_without_ranks_the_plan_is_that_of_all_rows():
    plan = inference_plan([4, 5, 6], 100)
    assert sorted(np.concatenate(plan).tolist()) == [0, 1, 2]


def test_all_tensors_are_on_the_micro_batchs_device(rollout):
    micro = MicroBatch(rollout, "meta")
    parts = (micro.packing, micro.responses)
    tensors = [micro.tokens, micro.predicted, micro.mask, micro.grid("logprobs"),
               *(place for part in parts for place in (part.positions, part.boundaries, part.grid_index))]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert {part.lengths.device.type for part in parts} == {"cpu"}


def test_passes_are_computed_on_the_device_asked_for(rollout):
    devices = []

    def forward(micro):
        devices.append(micro.tokens.device.type)
        return [torch.zeros(8)]

    score_columns(rollout, [np.arange(3)], "meta", forward)
    assert devices == ["meta"]


def test_a_merged_mean_is_that_of_everything_added():
    one, two = AverageMeter(), AverageMeter()
    one.add(3, {"loss": torch.tensor(2.0)})
    two.add(1, {"loss": torch.tensor(4.0), "kl": torch.tensor(0.5)})
    one.merge(two)
    assert one.means() == {"loss": 2.5, "kl": 0.5}
