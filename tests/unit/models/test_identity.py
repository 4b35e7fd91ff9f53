"""What tells a model from others, without reading all of its weights."""

import shutil

import pytest
import torch
from safetensors.torch import save_file

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import ModelError
from rlhf_ray.models.identity import TENSOR_BYTES, model_identity


def identity_of(path):
    return model_identity(ModelConfig(path=str(path)))


@pytest.fixture
def model(tmp_path):
    """A directory with two files of weights."""
    (tmp_path / "model").mkdir()
    for number in (1, 2):
        save_file({f"layer_{number}": torch.arange(4096.0), "bias": torch.ones(3)},
                  tmp_path / f"model/model-{number}.safetensors", metadata={"format": "pt"})
    return tmp_path / "model"


def test_the_same_weights_elsewhere_are_the_same_model(model, tmp_path):
    shutil.copytree(model, tmp_path / "moved")
    assert identity_of(tmp_path / "moved") == identity_of(model)
    save_file({"bias": torch.ones(3), "layer_2": torch.arange(4096.0)}, tmp_path / "moved/model-2.safetensors")
    assert identity_of(tmp_path / "moved") == identity_of(model)  # other metadata


@pytest.mark.parametrize("tensors", [
    {"layer_2": torch.arange(4096.0), "bias": torch.tensor([1.0, 1.0, 1.1])},
    {"layer_2": torch.arange(4096.0).view(2, -1), "bias": torch.ones(3)},
    {"layer_2": torch.arange(4096.0), "bios": torch.ones(3)},
    {"layer_2": torch.arange(4096.0)},
], ids=["values", "shape", "name", "missing"])
def test_one_other_tensor_makes_another_model(model, tensors):
    before = identity_of(model)
    save_file(tensors, model / "model-2.safetensors")
    assert identity_of(model) != before


def test_only_the_beginning_of_a_tensor_is_read(model):
    before, weights = identity_of(model), torch.arange(4096.0)
    weights[TENSOR_BYTES // weights.element_size()] = -1
    save_file({"layer_2": weights, "bias": torch.ones(3)}, model / "model-2.safetensors")
    assert identity_of(model) == before
    weights[TENSOR_BYTES // weights.element_size() - 1] = -1
    save_file({"layer_2": weights, "bias": torch.ones(3)}, model / "model-2.safetensors")
    assert identity_of(model) != before


@pytest.mark.parametrize("content", [b"", b"\x08", b"\xff" * 64, b"\x02" + bytes(7) + b"[]",
                                     b"\x08" + bytes(7) + b'{"a": 1}'])
def test_a_damaged_file_is_named(model, content):
    (model / "model-2.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model-2\.safetensors is not a readable safetensors file"):
        identity_of(model)
