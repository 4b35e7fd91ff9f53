"""Whose scores differ within a group."""

import torch

from rlhf_ray.algorithms.dynamic_sampling import scores_differ


def test_a_group_differs_if_any_of_its_scores_does():
    scores = torch.tensor([[1.0, 0.0], [0.5, 0.5], [1.0, 0.0], [0.5, 0.5], [0.5, 0.25], [-1.0, 0.0]])
    groups = torch.tensor([4, 2, 4, 2, 2, 9])
    assert scores_differ(scores, groups).tolist() == [False, True, False, True, True, False]
    assert scores_differ(scores[:, :1], groups).tolist() == [False] * 6


def test_scores_that_differ_by_the_last_bit_differ_and_equal_ones_do_not_whatever_their_mean_rounds_to():
    near = torch.tensor(0.1).nextafter(torch.tensor(1.0))
    scores = torch.tensor([0.1, float(near), 0.1, 0.1, 0.1])[:, None]
    assert scores_differ(scores, torch.tensor([0, 0, 1, 1, 1])).tolist() == [True, True, False, False, False]


def test_no_samples_have_no_groups():
    assert scores_differ(torch.zeros(0, 1), torch.zeros(0, dtype=torch.long)).tolist() == []
