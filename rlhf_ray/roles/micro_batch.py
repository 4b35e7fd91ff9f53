"""Micro-batches: rows of a record as tensors for one forward pass, scores of a whole record, averages of statistics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from rlhf_ray.algorithms.logprobs import SamplingMask
from rlhf_ray.data.batching import rows_of_rank
from rlhf_ray.engine.distributed import sum_over_ranks
from rlhf_ray.models.packing import Packing
from rlhf_ray.records import Rollout, TokenScores, offsets_of, row_indices


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a record, packed for a forward pass."""

    record: Any
    """The micro-batch's rows only: a `Rollout`, a `Batch`, or another record of rows with tokens."""
    device: torch.device | str

    @cached_property
    def tokens(self) -> Tensor:
        """[T] int64."""
        return torch.as_tensor(self.record.tokens.astype(np.int64), device=self.device)

    @cached_property
    def packing(self) -> Packing:
        """Lengths and positions of the rows."""
        return Packing.of(self.record.lengths, self.device)

    @cached_property
    def predicted(self) -> Tensor:
        """[n] flat positions of the response tokens."""
        return torch.as_tensor(np.flatnonzero(self.record.response_mask), device=self.device)

    @cached_property
    def responses(self) -> Packing:
        """A packing of the response tokens alone, which converts `[n]` numbers to `[N, L]` grids."""
        counts = np.add.reduceat(self.record.response_mask.astype(np.int64), self.record.offsets[:-1])
        return Packing.of(counts, self.device)

    @cached_property
    def mask(self) -> Tensor:
        """[N, L] True at tokens of the response grid."""
        return self.responses.to_grid(torch.ones_like(self.predicted, dtype=torch.bool), False)

    @cached_property
    def sampling_mask(self) -> SamplingMask | None:
        """The tokens that each of the n response tokens was sampled among; None if all of them among all."""
        sizes = self.record.mask_sizes
        if sizes is None or not sizes.any():
            return None
        sizes = sizes[self.record.response_mask]  # other tokens have none
        lengths = Packing.of(np.abs(sizes))
        listed = lengths.to_grid(torch.from_numpy(self.record.mask_tokens.astype(np.int64)), -1)
        return SamplingMask(listed.to(self.device), only=bool((sizes > 0).any()))

    @cached_property
    def row_weights(self) -> Tensor:
        """[N] see `SampleRows.row_weights`."""
        return torch.as_tensor(self.record.row_weights, device=self.device)

    def grid(self, column: str) -> Tensor:
        """[N, L] a per-token column of the record at its response tokens."""
        values = getattr(self.record, column)[self.record.response_mask]
        return self.responses.to_grid(torch.as_tensor(values, device=self.device))

    def lay_out(self, flat: Tensor) -> Tensor:
        """[N, L] from `[n]` numbers at the response tokens. Differentiable."""
        return self.responses.to_grid(flat)


def score_columns(
    rollout: Rollout,
    plan: Sequence[np.ndarray],
    device: torch.device | str,
    forward: Callable[[MicroBatch], Sequence[Tensor]],
    columns: int = 1,
) -> list[TokenScores]:
    """Columns of scores of the response tokens of the rows in `plan`, zero for all other tokens.

    Args:
        plan: micro-batches as row numbers; rows that are in none keep zeros.
        forward: returns each column's `[n]` numbers at a micro-batch's response tokens.
    """
    values = np.zeros((columns, len(rollout.tokens)), dtype=np.float32)
    for rows in plan:
        micro = MicroBatch(rollout.select(rows), device)
        places = row_indices(rollout.offsets, rows)[micro.record.response_mask]
        for column, numbers in zip(values, forward(micro), strict=True):
            column[places] = numbers.float().cpu().numpy()
    return [TokenScores(offsets=np.asarray(rollout.offsets), values=column) for column in values]


def share_of(scores: TokenScores, rank: int, world: int) -> TokenScores:
    """The contiguous rows that `inference_plan` assigns to `rank`."""
    rows = rows_of_rank(len(scores), rank, world)
    first, last = (rows[0], rows[-1] + 1) if len(rows) else (0, 0)
    offsets = scores.offsets
    return TokenScores(offsets=offsets_of(np.diff(offsets[first : last + 1])),
                       values=scores.values[offsets[first] : offsets[last]])


def concatenated(rollouts: Sequence[Rollout]) -> Rollout:
    """All rows of some rollouts in one rollout."""
    return rollouts[0] if len(rollouts) == 1 else Rollout.concat(rollouts)


def split_scores(scores: TokenScores, rollouts: Sequence[Rollout]) -> tuple[TokenScores, ...]:
    """The scores of each rollout, from those of their concatenated rows."""
    ends = np.cumsum([len(rollout.tokens) for rollout in rollouts])
    return tuple(TokenScores(offsets=np.asarray(rollout.offsets), values=values)
                 for rollout, values in zip(rollouts, np.split(scores.values, ends[:-1]), strict=True))


class AverageMeter:
    """Weighted means of a loss's statistics over micro-batches, mini-batches and ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def add(self, weight: float, stats: dict[str, float]) -> None:
        """Add means over `weight` tokens (or rows); a weight of 0 only registers the names."""
        for name, value in stats.items():
            self._weights[name] = self._weights.get(name, 0.0) + weight
            self._sums[name] = self._sums.get(name, 0.0) + (weight * float(value) if weight else 0.0)

    def merge(self, other: Self) -> None:
        """Add everything that was added to another one."""
        for name, weight in other._weights.items():
            self._weights[name] = self._weights.get(name, 0.0) + weight
            self._sums[name] = self._sums.get(name, 0.0) + other._sums[name]

    def copy(self) -> Self:
        """A copy of the sums so far, to restore if a following step is not applied."""
        other = type(self)()
        other._sums, other._weights = dict(self._sums), dict(self._weights)
        return other

    def means(self) -> dict[str, float]:
        """Weighted means over everything added on every rank. A collective call; all ranks must have the same names."""
        names = sorted(self._sums)
        both = torch.tensor([[self._sums[n] for n in names], [self._weights[n] for n in names]], dtype=torch.float64)
        sums, weights = sum_over_ranks(both)
        return {name: float(total / weight) for name, total, weight in zip(names, sums, weights, strict=True)}
