"""What tells a model from others, without reading all of its weights."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from rlhf_ray.config.model import ArchitectureConfig, ModelConfig, NewModelConfig
from rlhf_ray.errors import ModelError
from rlhf_ray.models.identity import TENSOR_BYTES, model_identity


def identity_of(path):
    return model_identity(ModelConfig(path=str(path)))


@pytest.fixture
def model(tmp_path):
    """A directory with two files of weights."""
    (tmp_path / "model").mkdir()
    for number in (1, 2):
        save_file({f"layer_{number}": torch.arange(4096.0), f"bias_{number}": torch.ones(3)},
                  tmp_path / f"model/model-{number}.safetensors", metadata={"format": "pt"})
    return tmp_path / "model"


def test_the_same_weights_elsewhere_are_the_same_model(model, tmp_path):
    shutil.copytree(model, tmp_path / "moved")
    assert identity_of(tmp_path / "moved") == identity_of(model)
    save_file({"bias_2": torch.ones(3), "layer_2": torch.arange(4096.0)}, tmp_path / "moved/model-2.safetensors")
    assert identity_of(tmp_path / "moved") == identity_of(model)  # other metadata


def test_files_that_are_not_loaded_and_how_tensors_are_divided_do_not_matter(tmp_path):
    tensors = {f"layer_{number}": torch.full((9,), float(number)) for number in range(12)}
    one, many = tmp_path / "one", tmp_path / "many"
    for directory in (one, many):
        directory.mkdir()
        (directory / "consolidated.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    save_file(tensors, one / "model.safetensors")
    places = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, many / file)
    (many / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert identity_of(one) == identity_of(many)
    (many / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json is damaged"):
        identity_of(many)


def test_new_models_differ_by_their_shape():
    def new(**shape):
        return model_identity(NewModelConfig(architecture=ArchitectureConfig(**shape), tokenizer="t"))

    assert new(layers=2) == new(layers=2) != new(layers=3)


@pytest.mark.parametrize("tensors", [
    {"layer_2": torch.arange(4096.0), "bias_2": torch.tensor([1.0, 1.0, 1.1])},
    {"layer_2": torch.arange(4096.0).view(2, -1), "bias_2": torch.ones(3)},
    {"layer_2": torch.arange(4096.0), "bios_2": torch.ones(3)},
    {"layer_2": torch.arange(4096.0)},
], ids=["values", "shape", "name", "missing"])
def test_one_other_tensor_makes_another_model(model, tensors):
    before = identity_of(model)
    save_file(tensors, model / "model-2.safetensors")
    assert identity_of(model) != before


def test_only_the_beginning_of_a_tensor_is_read(model):
    before, weights = identity_of(model), torch.arange(4096.0)
    weights[TENSOR_BYTES // weights.element_size()] = -1
    save_file({"layer_2": weights, "bias_2": torch.ones(3)}, model / "model-2.safetensors")
    assert identity_of(model) == before
    weights[TENSOR_BYTES // weights.element_size() - 1] = -1
    save_file({"layer_2": weights, "bias_2": torch.ones(3)}, model / "model-2.safetensors")
    assert identity_of(model) != before


@pytest.mark.parametrize("content", [b"", b"\x08", b"\xff" * 64, b"\x02" + bytes(7) + b"[]",
                                     b"\x08" + bytes(7) + b'{"a": 1}'])
def test_a_damaged_file_is_named(model, content):
    (model / "model-2.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model-2\.safetensors is not a readable safetensors file"):
        identity_of(model)
