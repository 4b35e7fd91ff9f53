"""Which part of a frozen model a process holds, and where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

Place = Callable[[Any], str]
"""Freezes a module, and puts it where its passes run; returns the device."""


@dataclass(frozen=True)
class Shard:
    """One of `world` equal parts of every parameter; the whole model with `world=1`. Processes that hold a model
    together make every pass together, each over rows of its own."""

    rank: int = 0
    world: int = 1

    @classmethod
    def of_worker(cls, rank: int, shards: int) -> Shard:
        """The part of a role's worker, where `shards` workers with consecutive ranks hold a copy of the model."""
        return cls(rank % shards, shards)

    @property
    def is_whole(self) -> bool:
        """Whether the process holds all of the model."""
        return self.world == 1


WHOLE = Shard()


def place_whole(module: nn.Module) -> str:
    """A `Place`: this process's device."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    module.to(device).eval().requires_grad_(False)
    return device
