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


def test_why_the_hub_has_no_shape_is_said_with_another_way():
    def fetch(model):
        raise ModelError("the Hub cannot be reached")

    with pytest.raises(ModelError, match=r"^model\.path='some/model': .* and the Hub cannot be reached\. .*"
                                         r"--shape some/model="):
        shape_of(ModelConfig(path="some/model"), "model", fetch)


def test_a_mixture_of_experts_that_is_not_counted_is_refused():
    with pytest.raises(ModelError, match="num_local_experts=8 .* mixture of experts, and only those of .*mixtral"):
        read_shape({**LLAMA, "num_local_experts": 8}, "m")
    with pytest.raises(ModelError, match="no num_experts_per_tok"):
        read_shape({**LLAMA, "model_type": "mixtral", "num_local_experts": 8}, "m")
    assert read_shape({**LLAMA, "num_experts": None}, "m").layers == 2


YARN = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "rope_theta": 10000}
MIXTURES = {
    "mistralai/Mixtral-8x7B-v0.1": ("mixtral", {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "Qwen/Qwen3-30B-A3B": ("qwen3_moe", {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "vocab_size": 151936,
        "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": []}),
    "openai/gpt-oss-20b": ("gpt_oss", {
        "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "intermediate_size": 2880, "vocab_size": 201088, "num_local_experts": 32,
        "num_experts_per_tok": 4}),
    "deepseek-ai/DeepSeek-V3": ("deepseek_v3", {
        "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "vocab_size": 129280, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "rope_parameters": YARN}),
    "dense layers among them": ("qwen2_moe", {
        "hidden_size": 64, "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 96, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
        "vocab_size": 320, "num_experts": 6, "num_experts_per_tok": 2, "decoder_sparse_step": 2,
        "mlp_only_layers": [3]}),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_counts_what_transformers_builds(name):
    """All weights, and those that a token is multiplied with: without the embedding, and of the experts its share."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family, values = MIXTURES[name]
    config = AutoConfig.for_model(family, **values, tie_word_embeddings=False)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    weights = {n: p.numel() for n, p in built.named_parameters()
               if p.dim() > 1 and not n.endswith(("bias", "shared_expert_gate.weight"))}
    experts = sum(count for n, count in weights.items() if ".mlp.experts." in n)
    shape = read_shape({**config.to_dict(), **values}, name)
    assert shape.parameters == sum(weights.values())
    spared = experts * (1 - shape.active_experts / shape.experts)
    assert shape.active == shape.parameters - spared - shape.vocabulary * shape.hidden
    known = shape_of(ModelConfig(path=name, dtype="bfloat16"), "model") if "/" in name else shape
    assert (known.parameters, known.active, known.cache_bytes) == (shape.parameters, shape.active, shape.cache_bytes)


@pytest.mark.parametrize(("name", "active", "cached"), [
    ("mistralai/Mixtral-8x7B-v0.1", 12.9, 128 * 2**10), ("Qwen/Qwen3-30B-A3B", 3.3, 96 * 2**10),
    ("openai/gpt-oss-20b", 3.6, 48 * 2**10), ("deepseek-ai/DeepSeek-V3", 37, 61 * 576 * 2)])
def test_the_weights_active_for_a_token_are_those_of_the_model_s_report(name, active, cached):
    """In billions, in most reports with the embedding; and bytes that the cache takes for a token in bfloat16."""
    shape = shape_of(ModelConfig(path=name, dtype="bfloat16"), "model")
    embedding = shape.vocabulary * shape.hidden
    assert shape.active <= active * 1.03e9 and shape.active + embedding >= active * 0.97e9
    assert shape.cache_bytes == cached
    assert shape.token_flops(0) == 2 * shape.active


def test_hand_counted_weights_of_a_mixture():
    shape = read_shape({**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1}, "m")
    attention, router, expert, head = 2 * 64 * (4 + 2) * 16, 64 * 4, 3 * 64 * 96, 320 * 64
    assert shape.layer_parameters == attention + router + 4 * expert
    assert shape.parameters == shape.multiplied == 2 * shape.layer_parameters + head, "tied"
    assert shape.active == 2 * (attention + router + expert) + head
    assert shape.read_bytes(1) == 2 * (shape.parameters - 2 * 3 * expert), "one token needs one expert of four"
    assert shape.read_bytes(1000) == pytest.approx(shape.weight_bytes)


def test_what_nobody_knows_is_refused_with_a_way_out(tmp_path):
    with pytest.raises(ModelError, match=r"model.path='no/such'.*--shape no/such="):
        shape_of(ModelConfig(path="no/such"), "model")
    with pytest.raises(ModelError, match="no num_hidden_layers and no vocab_size"):
        shape_of(written(tmp_path / "m", {"hidden_size": 8, "num_attention_heads": 2}), "model")
    (tmp_path / "m" / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        shape_of(ModelConfig(path=str(tmp_path / "m")), "model")
