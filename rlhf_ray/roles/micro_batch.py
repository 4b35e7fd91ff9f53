"""Micro-batches: rows of a record as tensors for one forward pass, their loss, scores of a whole record, averages of
statistics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from rlhf_ray.algorithms.logprobs import SamplingMask
from rlhf_ray.data.batching import rows_of_rank
from rlhf_ray.engine.distributed import sum_over_ranks
from rlhf_ray.models.packing import Packing, to_device
from rlhf_ray.records import GivenTokens, Rollout, TokenScores, offsets_of, row_indices


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a record, packed for a forward pass."""

    record: Any
    """The micro-batch's rows only: a `Rollout`, a `Batch`, or another record of rows with tokens."""
    device: torch.device | str

    @cached_property
    def tokens(self) -> Tensor:
        """[T] int64."""
        return self._on_device(self.record.tokens.astype(np.int64))

    @cached_property
    def packing(self) -> Packing:
        """Lengths and positions of the rows."""
        return Packing.of(self.record.lengths, self.device)

    @cached_property
    def predicted(self) -> Tensor:
        """[n] flat positions of the response tokens."""
        return self._on_device(np.flatnonzero(self.record.response_mask))

    @cached_property
    def response_tokens(self) -> float:
        """Number of the response tokens."""
        return float(self.record.response_mask.sum())

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
        return SamplingMask(to_device(listed, self.device), only=bool((sizes > 0).any()))

    @cached_property
    def row_weights(self) -> Tensor:
        """[N] see `SampleRows.row_weights`."""
        return self._on_device(self.record.row_weights)

    def grid(self, column: str) -> Tensor:
        """[N, L] a per-token column of the record at its response tokens."""
        values = getattr(self.record, column)[self.record.response_mask]
        return self.responses.to_grid(self._on_device(values))

    def lay_out(self, flat: Tensor) -> Tensor:
        """[N, L] from `[n]` numbers at the response tokens. Differentiable."""
        return self.responses.to_grid(flat)

    def _on_device(self, column: np.ndarray) -> Tensor:
        return to_device(torch.as_tensor(column), self.device)


@dataclass(frozen=True)
class PartLoss:
    """The loss of some rows, from one forward pass, and the statistics of that pass."""

    loss: Tensor
    """What is minimised, with its graph: a mean over the `Learner.count` of the rows."""
    means: Mapping[str, Tensor]
    """Statistics that are means over the same count, the loss or its terms among them."""
    tokens: float = 0.0
    """Number of response tokens of the rows."""
    token_means: Mapping[str, Tensor] = field(default_factory=dict)
    """Statistics that are means over the response tokens, however the loss is averaged."""


def score_columns(
    rollout: Rollout | GivenTokens,
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
    places, scored = [], []
    for rows in plan:
        micro = MicroBatch(rollout.select(rows), device)
        places.append(row_indices(rollout.offsets, rows)[micro.record.response_mask])
        scored.append(torch.stack([numbers.float() for numbers in forward(micro)]))
    if scored:  # read once: every reading waits until the GPU has finished its work
        values[:, np.concatenate(places)] = torch.cat(scored, 1).cpu().numpy()
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
    """Weighted means of a loss's statistics over micro-batches, mini-batches and ranks.

    Statistics stay on their device until `means` reads them all at once: reading one of them would wait until the GPU
    has finished its work.

    Example::

        meter = AverageMeter()
        meter.add(30, {"loss": torch.tensor(1.0)})
        meter.add(10, {"loss": torch.tensor(2.0)})
        meter.means()  # {"loss": 1.25}, if there is one rank
    """

    def __init__(self) -> None:
        self._added: list[tuple[float, tuple[str, ...], Tensor]] = []
        """(weight, names, [names] values) of each call of `add`."""

    def add(self, weight: float, stats: Mapping[str, Tensor]) -> None:
        """Add means over `weight` tokens (or rows); a weight of 0 only registers the names.

        Args:
            stats: numbers, or `[K]` numbers whose names get their places, in order: "name/00", "name/01".
        """
        names = [f"{name}/{i:02}" if value.ndim else name for name, value in stats.items()
                 for i in range(value.numel())]
        if names:
            self._added.append((weight, tuple(names), torch.cat([v.detach().reshape(-1) for v in stats.values()])))

    def merge(self, other: Self) -> None:
        """Add everything that was added to another one."""
        self._added += other._added

    def means(self) -> dict[str, float]:
        """Weighted means over everything added on every rank. A collective call; all ranks must have the same names."""
        sums_here, weights_here = self._totals()
        names = sorted(sums_here)
        both = torch.tensor([[here[name] for name in names] for here in (sums_here, weights_here)], dtype=torch.float64)
        sums, weights = sum_over_ranks(both)
        return {name: float(total / weight) for name, total, weight in zip(names, sums, weights, strict=True)}

    def _totals(self) -> tuple[dict[str, float], dict[str, float]]:
        """Sums of weighted values and of weights, by name, over everything added on this rank."""
        sums: dict[str, float] = {}
        weights: dict[str, float] = {}
        numbers = iter(torch.cat([values for *_, values in self._added]).tolist() if self._added else [])
        for weight, names, _ in self._added:
            for name, number in zip(names, islice(numbers, len(names)), strict=True):
                sums[name] = sums.get(name, 0.0) + (weight * number if weight else 0.0)
                weights[name] = weights.get(name, 0.0) + weight
        return sums, weights
