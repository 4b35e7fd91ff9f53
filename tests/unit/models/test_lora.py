"""Adapters in a model in memory: what is trained, what it amounts to, and that the base is still there."""

import pytest
import torch

from rlhf_ray.config.learner import LoRAConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import ModelError
from rlhf_ray.models.lora import Adapters, adapter_shapes, digest, layer_in_file
from rlhf_ray.models.lora_targets import check_targets, chosen_layers, shortest_targets
from rlhf_ray.models.packed_model import PackedLanguageModel
from rlhf_ray.models.packing import Packing
from tests.tiny_families import DECODERS, config_of

LORA = LoRAConfig(rank=2, alpha=6)


def adapt(model, config=LORA, **options):
    """Adapters with an effect: B starts at zero, so it gets numbers."""
    adapters = Adapters(model, config, "base", **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return adapters


def shapes(model):
    return [(name, tuple(p.shape)) for name, p in model.named_parameters()]


def merge_whole(adapters, model):
    names, tensors = [name for name, _ in adapters.base_shapes(shapes(model))], dict(model.named_parameters())
    return adapters.merged(names, {name: tensors[name].detach() for name in adapters.sources(names)})


@pytest.mark.parametrize("family", ["jamba", "mamba2"])
def test_families_that_compute_without_their_adapters_are_refused(family, tmp_path):
    from transformers import AutoModelForCausalLM

    shape = config_of(family, **DECODERS[family])
    with pytest.raises(ModelError, match=rf"lora.targets=.*{family}.*cannot have adapters.*remove lora"):
        Adapters(AutoModelForCausalLM.from_config(shape), LORA, "base")
    shape.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"policy.lora.targets=\['all-linear'\]"):
        check_targets(["all-linear"], ModelConfig(path=str(tmp_path)), "policy.lora.targets", scalar=False)


def test_a_merged_weight_by_hand():
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(vocab_size=4, hidden_size=2, intermediate_size=2, num_hidden_layers=1,
                                         num_attention_heads=1, num_key_value_heads=1))
    adapters = Adapters(model, LoRAConfig(rank=1, alpha=3, targets=["up_proj"]), "base")
    name = "model.layers.0.mlp.up_proj"
    tensors = {f"{name}.base_layer.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
               f"{name}.lora_A.default.weight": torch.tensor([[1.0, -1.0]]),
               f"{name}.lora_B.default.weight": torch.tensor([[2.0], [0.5]])}
    assert adapters.sources([f"{name}.weight", "model.norm.weight"]) == [*tensors, "model.norm.weight"]
    # W + 3/1 * B A, B A = [[2, -2], [0.5, -0.5]]
    merged = adapters.merged([f"{name}.weight"], tensors)[f"{name}.weight"]
    assert torch.equal(merged, torch.tensor([[7.0, -4.0], [4.5, 2.5]]))
    assert torch.equal(tensors[f"{name}.base_layer.weight"], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))


def test_published_adapters_by_hand():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=4, hidden_size=2, intermediate_size=3, num_hidden_layers=1, num_attention_heads=1,
                         num_key_value_heads=1)
    lora = LoRAConfig(rank=1, alpha=3, targets=["up_proj", "down_proj"])
    model = LlamaForCausalLM(config)
    adapters, layers = Adapters(model, lora, "base"), "model.layers.0.mlp"
    up = [f"base_model.model.{layers}.up_proj.lora_{kind}.weight" for kind in "AB"]
    tensors = {f"{layers}.up_proj.lora_A.default.weight": torch.tensor([[1.0, -1.0]]),
               f"{layers}.up_proj.lora_B.default.weight": torch.tensor([[2.0], [0.5], [-1.0]])}
    assert adapters.published_sources(up) == list(tensors)
    published = adapters.published(up, tensors)
    assert torch.equal(published[up[0]], torch.tensor([[1.0, -1.0]]))
    assert torch.equal(published[up[1]], torch.tensor([[6.0], [1.5], [-3.0]]))  # 3/1 * B
    expected = adapter_shapes(config, lora)
    assert dict(adapters.published_shapes(shapes(model))) == expected
    assert expected[up[0]] == (1, 2) and expected[up[1]] == (3, 1) and len(expected) == 4
    assert {layer_in_file(name) for name in expected} == {f"{layers}.up_proj", f"{layers}.down_proj"}


@pytest.mark.parametrize("tied", [True, False])
def test_the_merged_model_says_what_the_model_with_adapters_says(causal_lm, tied, tokens, packing):
    model, plain = causal_lm(tied), causal_lm(tied)
    base = shapes(plain)
    adapters = adapt(model)
    assert adapters.base_shapes(shapes(model)) == base
    predicted = torch.tensor([1, 2, 7, 8, 16])
    with torch.no_grad():
        before = PackedLanguageModel(plain)(tokens, packing, predicted)[0]
        plain.load_state_dict(merge_whole(adapters, model), strict=False)
        merged = PackedLanguageModel(plain)(tokens, packing, predicted)[0]
        adapted = PackedLanguageModel(model)(tokens, packing, predicted)[0]
        with adapters.disabled():
            disabled = PackedLanguageModel(model)(tokens, packing, predicted)[0]
        again = PackedLanguageModel(model)(tokens, packing, predicted)[0]
    assert (merged - adapted).abs().max() < 1e-5 and (merged - before).abs().max() > 0.01
    assert torch.equal(disabled, before) and torch.equal(again, adapted)


def test_a_transposed_layer_is_merged_as_it_is_stored():
    from transformers import GPT2Config, GPT2LMHeadModel

    def build():
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=8, n_layer=1, n_head=2)).eval()

    model, plain = build(), build()
    adapters = adapt(model)
    tokens = torch.arange(2, 12)[None]
    with torch.no_grad():
        plain.load_state_dict(merge_whole(adapters, model), strict=False)
        assert (plain(tokens).logits - model(tokens).logits).abs().max() < 1e-5
        assert (build()(tokens).logits - model(tokens).logits).abs().max() > 0.001


def test_only_adapters_are_trained_and_only_they_get_gradients(causal_lm):
    model = causal_lm()
    whole = sum(p.numel() for p in model.parameters())
    adapters = adapt(model)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == set(adapters.trained_names(shapes(model))) and len(trained) == 2 * 2 * 7
    # Rank 2 on layers of 32 and 64: 2 * (in + out) each, four of 32 + 32 and three of 32 + 64, in two blocks.
    assert sum(p.numel() for p in model.parameters()) - whole == 2 * 2 * (4 * 64 + 3 * 96)
    predicted = torch.tensor([1, 2])
    PackedLanguageModel(model)(torch.tensor([3, 4, 5]), Packing.of([3]), predicted)[0].sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == trained


def test_a_base_in_bfloat16_gets_adapters_in_float32(causal_lm):
    model = causal_lm(dtype=torch.bfloat16)
    adapters = adapt(model)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    trained = set(adapters.trained_names(shapes(model)))
    assert all((dtype == torch.float32) == (name in trained) for name, dtype in dtypes.items())
    assert PackedLanguageModel(model)(torch.tensor([3, 4, 5]), Packing.of([3]), torch.tensor([1]))[0].isfinite().all()


def test_under_autocast_nothing_is_converted_to_float32_and_back(causal_lm):
    answers, entering = [], []
    for autocast in (True, False):
        torch.manual_seed(0)
        model = causal_lm(dtype=torch.bfloat16)
        adapt(model, autocast=autocast)
        watched = [module for name, module in model.named_modules() if name.endswith("lora_A.default")]
        entered = set()
        for module in watched:
            module.register_forward_pre_hook(lambda _, inputs, seen=entered: seen.add(inputs[0].dtype))
        with torch.autocast("cpu", torch.bfloat16):
            logprobs = PackedLanguageModel(model)(torch.tensor([3, 4, 5, 6]), Packing.of([4]), torch.tensor([1, 3]))[0]
        logprobs.sum().backward()
        answers.append([logprobs.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        entering.append(entered)
    assert entering == [{torch.bfloat16}, {torch.float32}]
    assert len(answers[0]) > 1 and all(torch.equal(*pair) for pair in zip(*answers, strict=True)), "the same bits"


def test_targets_are_the_ends_of_names(causal_lm):
    model = causal_lm(tied=False)
    assert chosen_layers(model, ["0.self_attn.q_proj", "lm_head"]) == ["model.layers.0.self_attn.q_proj", "lm_head"]
    every = chosen_layers(model, ["all-linear"])
    assert len(every) == 14 and "lm_head" not in every
    assert shortest_targets(model, every) == sorted({name.split(".")[-1] for name in every})
    assert shortest_targets(model, every[:1]) == every[:1]


def test_adapters_on_fused_experts_are_refused_by_name():
    """peft takes a target that is also the name of an expert's projection for the experts, too."""
    from transformers import AutoModelForCausalLM

    def model():
        return AutoModelForCausalLM.from_config(config_of("deepseek_v3", **DECODERS["deepseek_v3"]))

    with pytest.raises(ModelError, match=r"fused experts \(model\.layers\.1\.mlp\.experts, .*attention: .*q_a_proj"):
        Adapters(model(), LoRAConfig(), "base")
    assert len(Adapters(model(), LoRAConfig(targets=["q_a_proj", "o_proj"]), "base").layers) == 4


def test_the_digest_tells_one_base_from_another(causal_lm):
    model = causal_lm()
    first = digest(model.named_parameters())
    assert digest(causal_lm().named_parameters()) == first
    assert digest(causal_lm(dtype=torch.bfloat16).named_parameters()) != first
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-6
    assert digest(model.named_parameters()) != first
