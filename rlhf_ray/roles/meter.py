"""Means of a loss's statistics over micro-batches, mini-batches and ranks."""

import torch

from rlhf_ray.engine.distributed import sum_over_ranks


class Meter:
    """Adds weighted numbers up; `means` divides once, over all ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weight = 0.0

    def add(self, weight: float, stats: dict[str, float]) -> None:
        """Add means that stand for `weight` tokens (or rows); a weight of 0 only registers the names."""
        self._weight += weight
        for name, value in stats.items():
            self._sums[name] = self._sums.get(name, 0.0) + (weight * float(value) if weight else 0.0)

    def means(self) -> dict[str, float]:
        """Weighted means over everything added on every rank; a collective call, names must agree between ranks."""
        names = sorted(self._sums)
        totals = sum_over_ranks(torch.tensor([self._weight, *(self._sums[n] for n in names)], dtype=torch.float64))
        return {name: float(total / totals[0]) for name, total in zip(names, totals[1:], strict=True)}
