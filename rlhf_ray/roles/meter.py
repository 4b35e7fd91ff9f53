"""Means of a loss's statistics over micro-batches, mini-batches and ranks."""

from typing import Self

import torch

from rlhf_ray.engine.distributed import sum_over_ranks


class Meter:
    """Adds weighted numbers up; `means` divides once, over all ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def add(self, weight: float, stats: dict[str, float]) -> None:
        """Add means that stand for `weight` tokens (or rows); a weight of 0 only registers the names."""
        for name, value in stats.items():
            self._weights[name] = self._weights.get(name, 0.0) + weight
            self._sums[name] = self._sums.get(name, 0.0) + (weight * float(value) if weight else 0.0)

    def copy(self) -> Self:
        """What was added so far, to go back to where what is added next turns out not to count."""
        other = type(self)()
        other._sums, other._weights = dict(self._sums), dict(self._weights)
        return other

    def means(self) -> dict[str, float]:
        """Weighted means over everything added on every rank; a collective call, names must agree between ranks."""
        names = sorted(self._sums)
        both = torch.tensor([[self._sums[n] for n in names], [self._weights[n] for n in names]], dtype=torch.float64)
        sums, weights = sum_over_ranks(both)
        return {name: float(total / weight) for name, total, weight in zip(names, sums, weights, strict=True)}
