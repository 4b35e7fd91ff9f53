"""Digests of tensors where they are: any change is seen, and where a tensor lies makes no difference."""

import pytest
import torch

from rlhf_ray.errors import WeightsError
from rlhf_ray.records import TensorEntry
from rlhf_ray.weights import fingerprint as module
from rlhf_ray.weights.fingerprint import fingerprint, require_fingerprint


def entry_of(tensor, name="w"):
    return TensorEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.nbytes)


def digest(tensor, name="w"):
    return fingerprint(entry_of(tensor, name), tensor)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def tensor(request):
    return torch.randn(7, 9, generator=torch.Generator().manual_seed(1)).to(request.param)


def test_one_flipped_bit_anywhere_is_seen(tensor):
    flat, whole = tensor.view(-1).view(torch.uint8), digest(tensor)
    for place in range(len(flat)):
        flat[place] ^= 1
        assert digest(tensor) != whole, place
        flat[place] ^= 1
    assert digest(tensor) == whole


def test_values_that_change_places_another_name_and_another_shape_are_seen(tensor):
    swapped = tensor.clone()
    swapped[0], swapped[1] = tensor[1], tensor[0]
    assert len({digest(tensor), digest(swapped), digest(tensor, "v"), digest(tensor.view(9, 7))}) == 4


def test_zeros_of_other_lengths_differ():
    assert digest(torch.zeros(3)) != digest(torch.zeros(5))


def test_it_does_not_depend_on_where_the_tensor_lies_or_how_it_is_cut(tensor, monkeypatch):
    buffer = torch.zeros(tensor.nbytes + 5, dtype=torch.uint8)
    item = tensor.element_size()
    stretch = buffer[item : item + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    stretch.copy_(tensor)
    whole = digest(tensor)
    assert digest(stretch) == digest(tensor.T.contiguous().T) == whole
    monkeypatch.setattr(module, "PIECE", 3)
    assert digest(tensor) == whole


def test_what_arrived_is_compared_with_what_was_announced(tensor):
    entry, sent = entry_of(tensor), digest(tensor)
    require_fingerprint(entry, tensor.clone(), sent)
    with pytest.raises(WeightsError, match="arrived with digest"):
        require_fingerprint(entry, tensor + 1, sent)
    with pytest.raises(WeightsError, match="was announced as"):
        require_fingerprint(entry, tensor.view(-1), sent)
    with pytest.raises(WeightsError, match="arrived as float64"):
        require_fingerprint(entry, tensor.double(), sent)
