"""A second set of weights of a tied model, without an engine; `tests/cluster/test_generator.py` runs engines."""

from concurrent.futures import ThreadPoolExecutor
from itertools import permutations

import pytest
import torch
import transformers
from torch import nn

from rlhf_ray.errors import DamagedBucket
from rlhf_ray.records import TensorEntry
from rlhf_ray.weights.double_buffer import DoubleBuffer
from rlhf_ray.weights.weight_loaders import Routes
from tests.threads import one_torch_thread

SHAPES = {"embed.weight": (4, 2), "lm_head.bias": (4,), "norm.weight": (2,)}


class Tied(nn.Module):
    """A head that shares the embedding's weight, with or without a bias of its own."""

    def __init__(self, bias):
        super().__init__()
        self.embed, self.norm, self.lm_head = nn.Embedding(4, 2), nn.LayerNorm(2, bias=False), nn.Linear(2, 4, bias)
        self.lm_head.weight = self.embed.weight
        self.requires_grad_(False)
        for parameter in self.parameters():
            parameter.weight_loader = lambda param, tensor: param.data.copy_(tensor)

    def load_weights(self, weights):
        own = dict(self.named_parameters())
        for name, tensor in weights:
            own[name].weight_loader(own[name], tensor)


def test_a_bucket_that_broke_off_may_be_loaded_again():
    """By then some of its layers are complete, and processed."""
    model = Tied(True)
    buffer = DoubleBuffer(Routes(model, transformers.LlamaConfig(), SHAPES), threads=1)
    new = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    tensors = [(TensorEntry(name, "float32", SHAPES[name], tensor.nbytes),
                tensor.flatten().view(torch.uint8).numpy()) for name, tensor in new.items()]

    def broken():
        yield from tensors[:2]
        raise DamagedBucket("the third")

    with pytest.raises(DamagedBucket):
        buffer.add(broken())
    buffer.add(tensors)
    buffer.require_complete_layers()
    buffer.swap()
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in new.items())


def test_weights_are_packed_with_the_number_of_threads_that_the_model_computes_with(monkeypatch):
    """Whatever the number of the thread that adds them: oneDNN's layouts depend on it."""
    packed_with = set()
    monkeypatch.setattr("rlhf_ray.weights.double_buffer.process_weights",
                        lambda layer: packed_with.add(torch.get_num_threads()))
    buffer = DoubleBuffer(Routes(Tied(False), transformers.LlamaConfig(), {"norm.weight": (2,)}), threads=3)
    tensor = (TensorEntry("norm.weight", "float32", (2,), 8), torch.ones(2).view(torch.uint8).numpy())
    with one_torch_thread(), ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(2,)) as pool:
        pool.submit(buffer.add, [tensor]).result()
    assert packed_with == {3}


@pytest.mark.parametrize("order", list(permutations(SHAPES)))
def test_a_tied_head_gets_the_embedding_and_its_own_bias_in_any_order(order):
    for names in (order, [name for name in order if "bias" not in name]):
        model = Tied(len(names) == 3)
        routes = Routes(model, transformers.LlamaConfig(), {name: SHAPES[name] for name in names})
        buffer = DoubleBuffer(routes, threads=1)
        new = {name: torch.randn(SHAPES[name]) for name in names}
        for name, tensor in new.items():
            entry = TensorEntry(name, "float32", SHAPES[name], tensor.nbytes)
            buffer.add([(entry, tensor.flatten().view(torch.uint8).numpy())])
        before = {name: value.clone() for name, value in model.state_dict().items()}
        assert not torch.equal(before["embed.weight"], new["embed.weight"])
        buffer.require_complete_layers()
        buffer.swap()
        assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in new.items())
        assert model.lm_head.weight is model.embed.weight
