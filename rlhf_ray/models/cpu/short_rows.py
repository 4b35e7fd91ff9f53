"""Causal attention over short rows in full precision on CPUs, by explicit matrix products.

Torch's own kernel is tiled for long rows. For rows of a few dozen tokens batched matrix products take two thirds of its
time, forward and backward, and four fifths at 128 tokens. They keep `[rows, heads, L, L]` probabilities for the
backward pass, so long rows use torch's kernel.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_ray.models.cpu.kernel_choice import takes_cpu_kernel
from rlhf_ray.models.packing import Packing

LONGEST = 128
"""Longest row, in tokens, for which the products are worth their memory."""


def takes_short_rows(query: Tensor, key: Tensor, packing: Packing, dropout: float) -> bool:
    """Whether `ShortRowAttention` applies to `[T, heads, D]` vectors: rows of up to `LONGEST` tokens, as many key heads
    as query heads, no dropout."""
    return (takes_cpu_kernel(query, precisions=(torch.float32, torch.float64)) and packing.longest <= LONGEST
            and query.shape[1] == key.shape[1] and not dropout)


@dataclass(frozen=True)
class Grid:
    """Some adjacent rows laid out as a `[rows, heads, L]` grid of vectors."""

    cells: slice
    """The grid's cells among those of all grids."""
    batch: int
    """Rows times heads."""
    length: int
    """Cells per row, L."""
    mask: Tensor
    """[L, L] causal mask added to scores: 0, or -inf for keys after the query."""

    def of(self, cells: Tensor) -> Tensor:
        """[batch, L, D] this grid's part of the `[G, D]` cells."""
        return cells[self.cells].view(self.batch, self.length, -1)


@dataclass(frozen=True)
class HeadGrids:
    """All rows of a packing as grids, for `[T, heads]` vectors stored contiguously."""

    grids: list[Grid]
    """One for each block of the packing."""
    cell_of_vector: Tensor
    """[T * heads] cell of each vector."""
    vector_of_cell: Tensor
    """[G] vector of each cell. Cells after a row's end hold vector 0, which the row's queries never attend to."""

    @classmethod
    def of(cls, packing: Packing, heads: int) -> "HeadGrids":
        """The grids of a packing, cached there for the next layer."""
        if heads not in packing.head_grids:
            packing.head_grids[heads] = cls._build(packing, heads)
        grids: HeadGrids = packing.head_grids[heads]
        return grids

    @classmethod
    def _build(cls, packing: Packing, heads: int) -> "HeadGrids":
        grids, cells, first, head = [], [], 0, torch.arange(heads)
        for block in packing.blocks:
            batch, length = block.rows * heads, block.longest
            grids.append(Grid(slice(first, first + batch * length), batch, length, _causal_mask(length)))
            row = block.row_of_token[:, None] * heads + head
            cells.append((first + row * length + block.positions[:, None]).flatten())
            first += batch * length
        cell_of_vector, vector_of_cell = torch.cat(cells), torch.zeros(first, dtype=torch.int64)
        vector_of_cell[cell_of_vector] = torch.arange(len(cell_of_vector))
        return cls(grids, cell_of_vector, vector_of_cell)


def _causal_mask(length: int) -> Tensor:
    return torch.full((length, length), float("-inf")).triu(1)


class ShortRowAttention(torch.autograd.Function):
    """softmax(Q K' scale + mask) V within each row and head, for `[T, heads, D]` queries, keys and values. Filler after
    the last row gets zeros."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, places: HeadGrids, scale: float
    ) -> Tensor:
        size = query.shape[-1]
        q, k, v = (x.reshape(-1, size).index_select(0, places.vector_of_cell) for x in (query, key, value))
        out, weights = torch.empty_like(q), []
        for grid in places.grids:
            scores = torch.baddbmm(grid.mask.to(q.dtype), grid.of(q), grid.of(k).mT, alpha=scale)
            weights.append(scores.softmax(-1))
            torch.bmm(weights[-1], grid.of(v), out=grid.of(out))
        ctx.save_for_backward(q, k, v, out, *weights)
        ctx.places, ctx.scale = places, scale
        return _vectors(out, places, query.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """dV = P' dO; dS = P (dO V' - rowsum(dO O)); dQ = dS K scale; dK = dS' Q scale (Dao et al. 2022, B.2)."""
        places, (q, k, v, out, *weights) = ctx.places, ctx.saved_tensors
        row_grad = grad.reshape(-1, grad.shape[-1])[: len(places.cell_of_vector)]
        d_out = torch.zeros_like(out).index_copy_(0, places.cell_of_vector, row_grad)
        d_q, d_k, d_v = (torch.empty_like(out) for _ in range(3))
        towards_out = (d_out * out).sum(-1, keepdim=True)
        for grid, p in zip(places.grids, weights, strict=True):
            d_scores = torch.bmm(grid.of(d_out), grid.of(v).mT).sub_(grid.of(towards_out)).mul_(p).mul_(ctx.scale)
            torch.bmm(p.mT, grid.of(d_out), out=grid.of(d_v))
            torch.bmm(d_scores, grid.of(k), out=grid.of(d_q))
            torch.bmm(d_scores.mT, grid.of(q), out=grid.of(d_k))
        d_q, d_k, d_v = (_vectors(x, places, grad.shape) for x in (d_q, d_k, d_v))
        return d_q, d_k, d_v, None, None


def _vectors(cells: Tensor, places: HeadGrids, shape: torch.Size) -> Tensor:
    """[T, heads, D] vectors from their `[G, D]` cells, zero after the last row."""
    vectors, known = cells.new_empty(shape), len(places.cell_of_vector)
    flat = vectors.view(-1, shape[-1])
    torch.index_select(cells, 0, places.cell_of_vector, out=flat[:known])
    flat[known:] = 0
    return vectors
