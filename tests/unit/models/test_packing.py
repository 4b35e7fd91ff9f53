"""Where packed rows lie, and the way to a grid and back."""

import numpy as np
import pytest
import torch

from rlhf_ray.models import packing as packing_module
from rlhf_ray.models.packing import Packing


def test_places_by_hand():
    packing = Packing.of(np.array([2, 3, 1]))
    assert (packing.rows, packing.tokens, packing.longest) == (3, 6, 3)
    assert packing.positions.tolist() == [0, 1, 0, 1, 2, 0]
    assert packing.row_of_token.tolist() == [0, 0, 1, 1, 1, 2]
    assert packing.ends.tolist() == [2, 5, 6]
    assert packing.grid_index.tolist() == [0, 1, 3, 4, 5, 6]


def test_a_grid_by_hand():
    flat = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    grid = Packing.of([2, 3, 1]).to_grid(flat, fill=-1)
    assert grid.tolist() == [[1, 2, -1], [3, 4, 5], [6, -1, -1]]


def test_an_empty_row_is_all_filling():
    packing = Packing.of([2, 0, 1])
    assert packing.positions.tolist() == [0, 1, 0]
    assert packing.to_grid(torch.tensor([1, 2, 3])).tolist() == [[1, 2], [0, 0], [3, 0]]
    assert packing.from_grid(torch.tensor([[1, 2], [8, 9], [3, 7]])).tolist() == [1, 2, 3]


@pytest.mark.parametrize("lengths, shape", [([], (0, 0)), ([0, 0], (2, 0))])
def test_nothing_at_all_makes_an_empty_grid(lengths, shape):
    packing = Packing.of(lengths)
    assert (packing.tokens, packing.longest) == (0, 0)
    assert packing.positions.tolist() == []
    assert packing.ends.tolist() == [0] * len(lengths)
    assert packing.to_grid(torch.empty(0)).shape == shape
    assert packing.from_grid(torch.empty(shape)).shape == (0,)


@pytest.mark.parametrize("trailing", [(), (3,), (2, 3)])
def test_a_round_trip_gives_everything_back(trailing):
    packing = Packing.of([4, 1, 6])
    flat = torch.randn(11, *trailing)
    assert torch.equal(packing.from_grid(packing.to_grid(flat, fill=7)), flat)


def test_gradients_pass_both_ways():
    packing = Packing.of([2, 1])
    flat = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (packing.to_grid(flat) * torch.tensor([[1.0, 2.0], [3.0, 50.0]])).sum().backward()
    assert flat.grad.tolist() == [1, 2, 3]
    grid = torch.zeros(2, 2, requires_grad=True)
    (packing.from_grid(grid) * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert grid.grad.tolist() == [[1, 2], [3, 0]]


def test_neighbouring_rows_make_blocks_of_some_hundred_tokens(monkeypatch):
    monkeypatch.setitem(packing_module.BLOCK_TOKENS, "cpu", 10)
    blocks = Packing.of([7, 5, 4, 4, 30, 2, 1, 3]).blocks
    assert [block.lengths.tolist() for block in blocks] == [[7], [5, 4, 4], [30], [2, 1, 3]]
    assert [block.lengths.tolist() for block in Packing.of([4, 6]).blocks] == [[4, 6]]


def test_rows_of_one_length_are_a_grid_and_one_block(monkeypatch):
    monkeypatch.setitem(packing_module.BLOCK_TOKENS, "cpu", 10)
    same, other = Packing.of([5, 5, 5, 5]), Packing.of([5, 5, 5, 4])
    assert same.is_grid and len(same.blocks) == 1 and not other.is_grid and len(other.blocks) == 2
