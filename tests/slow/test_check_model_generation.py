"""`check-model` notices what vLLM does with a model: the real engine, before and after new weights."""

from pathlib import Path

import pytest
import torch

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import ModelError
from rlhf_ray.stages.model_checks import generation_part
from rlhf_ray.weights.publication import SealedBuckets
from tests.real_models import make_real_model

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ModelConfig(path=str(make_real_model(tmp_path_factory.mktemp("m") / "qwen", "qwen")))


def test_a_model_that_works(model):
    generation, publication = generation_part.check_generation(model, tokens=64)
    assert (generation.verdict, publication.verdict) == ("works", "works")
    assert generation.numbers["difference"] < 1e-4 and publication.numbers["difference"] < 1e-4
    assert publication.numbers["change"] > 0.1


def test_weights_that_do_not_arrive_are_noticed(model, monkeypatch):
    """The new version is confirmed, but its tensors are those of the files."""
    from safetensors.torch import load_file

    files = {}
    for file in sorted(Path(model.path).glob("*.safetensors")):
        files |= load_file(file)

    class OldTensors(SealedBuckets):
        def __init__(self, tensors, changing, bucket_bytes, gather):
            super().__init__(tensors, changing, bucket_bytes, lambda names: {name: files[name] for name in names})

    monkeypatch.setattr(generation_part, "SealedBuckets", OldTensors)
    _, publication = generation_part.check_generation(model, tokens=64)
    assert publication.verdict == "fails" and "differ by" in publication.detail


def test_a_generator_of_other_weights_is_noticed(model, monkeypatch):
    reference = generation_part._reference

    def other(config):
        loaded = reference(config)
        with torch.no_grad():
            loaded.get_input_embeddings().weight.mul_(1.05)
        return loaded

    monkeypatch.setattr(generation_part, "_reference", other)
    with pytest.raises(ModelError, match="sampled tokens differ by .* nats from transformers'"):
        generation_part.check_generation(model, tokens=64)
