"""Division of rows among ranks and micro-batches. Computes row numbers only.

A micro-batch of rows costs `rows x longest row` tokens, because a forward pass lays rows side by side; `max_tokens`
bounds that, and so bounds the true tokens as well.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.errors import ConfigError

RowNumbers = NDArray[np.int64]
"""[K] row numbers."""


def balanced_partition(lengths: Any, parts: int) -> list[RowNumbers]:
    """Rows divided among `parts` so that token totals are close; each share in ascending order.

    Longest first, each to the lightest share so far (Graham 1969: the heaviest share is at most 4/3 of the best
    possible). Shares are empty only when there are fewer rows than parts.

    Args:
        lengths: [N] tokens per row.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    shares: list[list[int]] = [[] for _ in range(parts)]
    lightest = [(0, 0, part) for part in range(parts)]  # tokens, rows, part; of equal weight, fewest rows first
    for row in np.argsort(-lengths, kind="stable"):
        tokens, rows, part = lightest[0]
        shares[part].append(int(row))
        heapq.heapreplace(lightest, (tokens + int(lengths[row]), rows + 1, part))
    return [np.array(sorted(share), dtype=np.int64) for share in shares]


def micro_batches(lengths: Any, max_tokens: int) -> list[RowNumbers]:
    """The fewest micro-batches of neighbours in length within the budget, of similar cost; longest rows first.

    Args:
        lengths: [N] tokens per row.
        max_tokens: bound of `rows x longest row` of each micro-batch.

    Raises:
        ConfigError: a row longer than `max_tokens`.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if not len(lengths):
        return []
    longest = int(lengths.max())
    if longest > max_tokens:
        raise ConfigError(f"row {int(lengths.argmax())} has {longest} tokens and fits in no micro-batch of "
                          f"{max_tokens}; raise micro_batch_tokens to at least {longest}")
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    starts = _cut(descending, _smallest_budget(descending, max_tokens))
    return np.split(order, starts[1:])


def _cut(descending: NDArray[np.int64], budget: int) -> list[int]:
    """Starts of the micro-batches when each takes as many rows as fit."""
    starts, row = [], 0
    while row < len(descending):
        starts.append(row)
        row += budget // max(int(descending[row]), 1)
    return starts


def _smallest_budget(descending: NDArray[np.int64], max_tokens: int) -> int:
    """The smallest budget that needs no more micro-batches than `max_tokens` does; it makes them similar."""
    fewest = len(_cut(descending, max_tokens))
    low, high = max(int(descending[0]), 1), max_tokens
    while low < high:
        middle = (low + high) // 2
        if len(_cut(descending, middle)) <= fewest:
            high = middle
        else:
            low = middle + 1
    return low


def rows_of_rank(count: int, rank: int, world: int) -> RowNumbers:
    """The contiguous rows of `count` that a rank processes in `inference_plan`."""
    return np.array_split(np.arange(count), world)[rank]


def inference_plan(
    lengths: Any, budget: int, rank: int = 0, world: int = 1, lockstep: bool = False
) -> list[RowNumbers]:
    """This rank's share of some rows as micro-batches for a forward pass.

    Each rank gets contiguous rows, so the ranks' results can be concatenated. In lockstep (ZeRO-3 gathers parameters
    from all ranks in every forward pass) all ranks get the same number of micro-batches; if one has fewer, it repeats
    its first.

    Args:
        lengths: [N] tokens per row.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    shares = [rows_of_rank(len(lengths), each, world) for each in range(world)]
    plans = [[share[rows] for rows in micro_batches(lengths[share], budget)] if len(share) else []
             for share in shares]
    mine = plans[rank]
    if lockstep:
        filler = mine[0] if mine else np.array([0])
        mine = mine + [filler] * (max(map(len, plans)) - len(mine))
    return mine


def rank_plan(lengths: Any, ranks: int, max_tokens: int) -> list[list[RowNumbers]]:
    """Each rank's micro-batches of row numbers, the same number of them on every rank.

    Collective calls inside a forward or backward pass must match across ranks. A rank that needs fewer micro-batches
    gets its costliest ones halved; only one with fewer rows than micro-batches gets empty ones, at the end.

    Args:
        lengths: [N] tokens per row.

    Raises:
        ConfigError: a row longer than `max_tokens`.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    shares = balanced_partition(lengths, ranks)
    plan = [[share[batch] for batch in micro_batches(lengths[share], max_tokens)] for share in shares]
    count = max((len(batches) for batches in plan), default=0)
    return [_cut_finer(batches, count, lengths) for batches in plan]


def _cut_finer(batches: list[RowNumbers], count: int, lengths: NDArray[np.int64]) -> list[RowNumbers]:
    """`count` micro-batches of the same rows in the same order, then empty ones if there are too few rows."""
    batches = list(batches)
    while len(batches) < count:
        costs = [len(b) * int(lengths[b].max()) if len(b) > 1 else -1 for b in batches]
        if max(costs, default=-1) < 0:
            return batches + [np.empty(0, dtype=np.int64)] * (count - len(batches))
        i = int(np.argmax(costs))
        half = len(batches[i]) // 2
        batches[i : i + 1] = [batches[i][:half], batches[i][half:]]
    return batches
