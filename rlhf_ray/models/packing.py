"""Rows packed end to end in one sequence, and their conversion to and from padded grids.

A forward pass runs over one flat sequence of all rows' tokens. Only attention needs to know where rows end; it reads
`Packing`. Padding exists only inside attention (see `attention.py`) and in grids of per-token numbers, not in a model's
other layers.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

BLOCK_TOKENS = {"cpu": 384}
"""Tokens of a block of rows for attention, by device type: on a CPU padding costs more than additional calls."""
BLOCK_TOKENS_ELSEWHERE = 2**14
"""On a GPU each call should do much work."""


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor in main memory, on `device`. A GPU's work in progress is not waited for: the copy is made from pinned
    memory, in the order of the GPU's own work."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def without_filler(flat: Tensor, filler: int) -> Tensor:
    """`[T + filler, ...]` numbers without the last `filler`. The same tensor where there are none: the backward pass of
    a slice, even of a whole one, copies the gradient into zeros."""
    return flat[: len(flat) - filler] if filler else flat


@dataclass(frozen=True)
class Packing:
    """Lengths and positions of the rows of a packed sequence.

    Sizes are computed in main memory. Read from a GPU, each number would wait until the GPU has finished its work.
    """

    lengths: Tensor
    """[N] int64 number of tokens per row, in main memory."""
    device: torch.device | str = "cpu"
    """Where the packed rows are, and with them `boundaries`, `positions` and `grid_index`."""
    block_tokens: int | None = None
    """Tokens of a block of rows for attention; None for the default of the device type."""

    @classmethod
    def of(cls, lengths: np.ndarray, device: torch.device | str = "cpu") -> "Packing":
        """A packing of rows with the given lengths."""
        return cls(torch.as_tensor(np.asarray(lengths, dtype=np.int64)), device)

    @cached_property
    def rows(self) -> int:
        """Number of rows N."""
        return len(self.lengths)

    @cached_property
    def tokens(self) -> int:
        """Number of tokens T of all rows."""
        return int(self.lengths.sum())

    @cached_property
    def longest(self) -> int:
        """Number of tokens of the longest row, L."""
        return int(self.lengths.max()) if self.rows else 0

    @cached_property
    def ends(self) -> Tensor:
        """[N] flat position after each row's last token, in main memory."""
        return self.lengths.cumsum(0)

    @cached_property
    def offsets(self) -> Tensor:
        """[N + 1] flat position of each row's first token, and after the last row's end, in main memory."""
        return torch.cat([self.ends.new_zeros(1), self.ends])

    @cached_property
    def boundaries(self) -> Tensor:
        """[N + 1] int32 `offsets`."""
        return to_device(self.offsets.to(torch.int32), self.device)

    def prepare(self) -> None:
        """Compute what attention reads. A compiled layer that computed it would be another graph."""
        _ = self.tokens, self.longest, self.offsets
        if torch.device(self.device).type == "cuda":
            _ = self.boundaries

    @cached_property
    def row_of_token(self) -> Tensor:
        """[T] row number of each token, in main memory."""
        return torch.repeat_interleave(torch.arange(self.rows), self.lengths)

    @cached_property
    def _positions(self) -> Tensor:
        starts = self.ends - self.lengths
        return torch.arange(self.tokens) - starts[self.row_of_token]

    @cached_property
    def positions(self) -> Tensor:
        """[T] position of each token inside its row, from 0."""
        return to_device(self._positions, self.device)

    @cached_property
    def grid_index(self) -> Tensor:
        """[T] index of each token in a flattened `[N, L]` grid."""
        return to_device(self.row_of_token * self.longest + self._positions, self.device)

    @cached_property
    def is_grid(self) -> bool:
        """Whether all rows have the same length, so that the packed sequence already is a grid."""
        return self.tokens == self.rows * self.longest

    @cached_property
    def head_grids(self) -> dict[int, Any]:
        """Grids of the rows by number of heads (`cpu.short_rows.HeadGrids`), computed once for all layers."""
        return {}

    @cached_property
    def blocks(self) -> list["Packing"]:
        """The rows in order, divided into blocks of some hundred tokens. Each block becomes its own grid, which needs
        little padding if adjacent rows have similar lengths. Rows that all have one length form one block."""
        size = self.block_tokens or BLOCK_TOKENS.get(torch.device(self.device).type, BLOCK_TOKENS_ELSEWHERE)
        if self.is_grid or self.tokens <= size:
            return [self]
        number = torch.div(self.ends - 1, size, rounding_mode="floor")
        counts = number.unique_consecutive(return_counts=True)[1].tolist()
        return [Packing(lengths, self.device) for lengths in self.lengths.split(counts)]

    def to_grid(self, flat: Tensor, fill: float | bool = 0) -> Tensor:
        """`[T, ...]` per-token numbers as a `[N, L, ...]` grid with `fill` after each row's end. Differentiable."""
        grid = flat.new_full((self.rows * self.longest, *flat.shape[1:]), fill)
        return grid.index_copy(0, self.grid_index, flat).view(self.rows, self.longest, *flat.shape[1:])

    def from_grid(self, grid: Tensor) -> Tensor:
        """The `[T, ...]` tokens of a `[N, L, ...]` grid without the padding. Differentiable."""
        return grid.reshape(self.rows * self.longest, *grid.shape[2:])[self.grid_index]
