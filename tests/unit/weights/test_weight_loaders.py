"""Where a model's own loader puts tensors, learned from a model that transforms some of them first."""

import copy

import torch
import transformers
from torch import nn

from rlhf_ray.weights.weight_loaders import Routes


class Transposing(nn.Module):
    """Stores [in, out] matrices of a checkpoint as [out, in], as vLLM does GPT-2's."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        for parameter in self.layer.parameters():
            parameter.weight_loader = self.load

    @staticmethod
    def load(parameter, tensor):
        parameter.data.copy_(tensor)

    def load_weights(self, weights):
        own = dict(self.named_parameters())
        for name, tensor in weights:
            own[name].weight_loader(own[name], tensor.t() if tensor.ndim == 2 else tensor)


def named(layer):
    return list(layer.named_parameters())


def test_what_is_copied_between_two_tensors_loads_the_second_too():
    """A shadow copies a layer's parameters, loaders included, as the first of its tensors comes."""
    model = Transposing()
    routes, double = Routes(model, transformers.LlamaConfig(), {"layer.weight": (3, 2), "layer.bias": (2,)}), None
    given = {"layer.weight": torch.arange(6.0).view(3, 2), "layer.bias": torch.tensor([7.0, 8.0])}
    for name, tensor in given.items():
        for route in routes.of(name, tensor):
            if double is None:
                double = copy.copy(model.layer)
                double._parameters = {key: nn.Parameter(torch.empty(p.shape)) for key, p in named(model.layer)}
                for key, parameter in named(model.layer):
                    double._parameters[key].weight_loader = parameter.weight_loader
            parameter = double._parameters[route.parameter]
            parameter.weight_loader(parameter, route.tensor, *route.arguments, **route.keywords)
    assert torch.equal(double.weight, given["layer.weight"].t()) and torch.equal(double.bias, given["layer.bias"])
    assert not torch.equal(model.layer.weight, double.weight), "the model itself is not touched"
