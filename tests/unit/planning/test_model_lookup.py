"""Shapes of models: from files, from the table, from what a person says."""

import json

import pytest

from rlhf_ray.config.model import ArchitectureConfig, ModelConfig, NewModelConfig
from rlhf_ray.config.stages import ScorerConfig
from rlhf_ray.errors import ModelError
from rlhf_ray.planning.inference_memory import scorer_memory
from rlhf_ray.planning.model_lookup import KNOWN, read_shape, shape_of

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 320, "tie_word_embeddings": True}


def written(directory, values):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values))
    return ModelConfig(path=str(directory), dtype="bfloat16")


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.names[0])
def test_known_models_have_the_weights_that_their_cards_tell(known):
    assert known.shape.parameters == pytest.approx(known.billions * 1e9, rel=0.02)


@pytest.mark.parametrize("tied", [True, False])
def test_a_shape_counts_what_transformers_builds(tmp_path, tied):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = written(tmp_path / "m", {**LLAMA, "tie_word_embeddings": tied})
    with torch.device("meta"):
        built = LlamaForCausalLM(LlamaConfig(**{**LLAMA, "tie_word_embeddings": tied}))
    norms = (2 * 2 + 1) * 64
    assert shape_of(model, "model").parameters + norms == sum(p.numel() for p in built.parameters())


def test_heads_of_their_own_width_count():
    shape = read_shape({**LLAMA, "head_dim": 32}, "m")
    assert shape.cache_bytes == 2 * 2 * 2 * 32 * 2
    assert shape.layer_parameters == 2 * 64 * (4 + 2) * 32 + 3 * 64 * 96


def test_the_models_precision_is_the_configurations(tmp_path):
    model = written(tmp_path / "m", LLAMA)
    assert shape_of(model, "model").bytes_per_value == 2
    assert shape_of(model.model_copy(update={"dtype": "float32"}), "model").bytes_per_value == 4


def test_weights_in_another_precision_than_their_files_take_both(tmp_path):
    same = shape_of(written(tmp_path / "a", {**LLAMA, "dtype": "bfloat16"}), "model")
    other = shape_of(written(tmp_path / "b", {**LLAMA, "torch_dtype": "float32"}), "model")
    each = [scorer_memory(ScorerConfig(), shape, 1, 64, 1.0).host_bytes for shape in (same, other)]
    assert each[1] - each[0] == 4 * same.parameters


def test_a_new_model_has_as_many_tokens_as_its_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({
        "model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "</s>"}]}))
    model = NewModelConfig(architecture=ArchitectureConfig(), tokenizer=str(tmp_path))
    assert shape_of(model, "model").vocabulary == 3


def test_the_hub_is_asked_last():
    asked = []

    def fetch(model):
        asked.append(model.path)
        return LLAMA

    assert shape_of(ModelConfig(path="Qwen/Qwen2.5-7B"), "model", fetch).hidden == 3584
    assert not asked
    assert shape_of(ModelConfig(path="somebody/else"), "model", fetch).hidden == 64
    assert asked == ["somebody/else"]


def test_a_mixture_of_experts_is_refused():
    with pytest.raises(ModelError, match="num_local_experts=8 .* mixture of experts"):
        read_shape({**LLAMA, "num_local_experts": 8}, "m")
    assert read_shape({**LLAMA, "num_experts": None}, "m").layers == 2


def test_what_nobody_knows_is_refused_with_a_way_out(tmp_path):
    with pytest.raises(ModelError, match=r"model.path='no/such'.*--shape no/such="):
        shape_of(ModelConfig(path="no/such"), "model", lambda _: None)
    with pytest.raises(ModelError, match="no num_hidden_layers and no vocab_size"):
        shape_of(written(tmp_path / "m", {"hidden_size": 8, "num_attention_heads": 2}), "model")
    (tmp_path / "m" / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        shape_of(ModelConfig(path=str(tmp_path / "m")), "model")
