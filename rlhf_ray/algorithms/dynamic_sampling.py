"""Which prompts teach something: those whose responses do not all have the same score (DAPO, Yu et al. 2025)."""

from torch import Tensor, unique


def scores_differ(scores: Tensor, groups: Tensor) -> Tensor:
    """Whether the scores of a sample's group differ: if none does, all advantages of the group are 0 (DAPO, eq. 11).

    Compared are the scores themselves. A standard deviation that is computed from equal numbers need not be 0.

    Args:
        scores: `[S, K]`: K scores of each sample; a group counts if one of them differs in it. A NaN is no score, and
            is not compared.
        groups: `[S]` integers: samples with equal numbers form a group, in any order.

    Returns:
        `[S]` bool, the same for all samples of a group.
    """
    labels, member = unique(groups, return_inverse=True)
    places = member[:, None].expand_as(scores)
    none = scores.new_full((len(labels), scores.shape[1]), float("inf"))
    lowest = none.scatter_reduce(0, places, scores.nan_to_num(nan=float("inf")), "amin")
    highest = (-none).scatter_reduce(0, places, scores.nan_to_num(nan=float("-inf")), "amax")
    return (lowest < highest).any(-1)[member]
