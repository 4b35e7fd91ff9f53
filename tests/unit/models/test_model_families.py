"""What is known of model families: right on packed rows, or refused by name and before anything starts."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_layers import GenericForSequenceClassification

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import ModelError
from rlhf_ray.models.loading import load_causal_lm, load_scalar_model
from rlhf_ray.models.model_families import DECODING, FAMILIES, PACKED, POLICY, Use, check_family, why_padded
from rlhf_ray.models.packed_model import Chunks, PackedLanguageModel, PackedScalarModel
from rlhf_ray.models.packing import Packing
from tests.tiny_families import DECODERS, config_of, randomised

ROOT = Path(__file__).parents[3]
LENGTHS = (5, 1, 9, 32, 12)
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8, "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
LONG = {"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [4.0] * 8, "rope_theta": 1e4,
        "original_max_position_embeddings": 32}
SCALED = {"llama3": ("llama", LLAMA3), "yarn": ("qwen2", YARN), "linear": ("llama", LINEAR),
          "dynamic": ("llama", DYNAMIC), "longrope": ("phi3", LONG)}


DEFAULT = {  # one of each kind of attention, of each way from states to logits, and of each way of padding
    "bloom", "cohere", "deepseek_v3", "gemma2", "gemma3_text", "gpt2", "gpt_oss", "granite", "llama", "mamba",
    "mistral", "mixtral", "nemotron", "opt", "qwen2", "qwen2_moe", "qwen3"}
EACH = [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.slow) for name in DECODERS]


def random_tokens():
    return torch.randint(2, 64, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))


def language_model(config, directory, dtype=torch.float32):
    """transformers' own model, saved. Its plainest attention, but Falcon's adds ALiBi twice."""
    attention = "sdpa" if config.model_type == "falcon" else "eager"
    plain = randomised(transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)).to(dtype)
    plain.save_pretrained(directory)
    return plain


def logprobs_alone(plain, tokens):
    """[n] log-probabilities of all tokens but rows' first by transformers' own model, a row at a time."""
    alone = []
    for row in tokens.split(list(LENGTHS)):
        scores = plain(input_ids=row[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        alone.append(scores.gather(1, row[1:, None])[:, 0])
    return torch.cat(alone)


def packed_and_alone(config, directory):
    """[n] log-probabilities of all tokens but rows' first, together; and a row at a time."""
    plain, tokens, packing = language_model(config, directory), random_tokens(), Packing.of(np.array(LENGTHS))
    with torch.no_grad():
        packed, _ = PackedLanguageModel(load_causal_lm(ModelConfig(path=str(directory))).eval())(
            tokens, packing, packing.positions.nonzero()[:, 0])
        return packed, logprobs_alone(plain, tokens)


def gradients_of(model, outputs):
    """Gradients of a sum of the outputs with uneven weights, by parameter."""
    names, parameters = zip(*((n, p) for n, p in model.named_parameters()), strict=True)
    weights = torch.linspace(-1, 1, len(outputs)) ** 3
    found = torch.autograd.grad((outputs.float() * weights).sum(), parameters, allow_unused=True)
    return {name: grad for name, grad in zip(names, found, strict=True) if grad is not None}


def assert_same_gradients(ours, theirs):
    assert ours.keys() == theirs.keys()
    typical = max(float(grad.norm()) for grad in theirs.values())
    for name, grad in theirs.items():
        gap = float((ours[name] - grad).norm()) / max(float(grad.norm()), 1e-3 * typical)
        assert gap < 1e-3, f"{name}: {gap}"


def test_what_is_listed_as_right_is_tested_here_and_only_that():
    assert {name for name, family in FAMILIES.items() if Use.LANGUAGE in family.supported} == set(DECODERS)
    assert not any(family.supported & family.refused.keys() for family in FAMILIES.values())


@pytest.mark.parametrize("family", EACH)
def test_a_learner_s_log_probabilities_and_gradients_are_transformers_own(family, tmp_path):
    plain, tokens, packing = (language_model(config_of(family, **DECODERS[family]), tmp_path), random_tokens(),
                              Packing.of(np.array(LENGTHS)))
    ours, chunks = load_causal_lm(ModelConfig(path=str(tmp_path))).eval(), Chunks(elements=20 * 64)
    packed, _ = PackedLanguageModel(ours, chunks=chunks)(tokens, packing, packing.positions.nonzero()[:, 0])
    alone = logprobs_alone(plain, tokens)
    assert alone.std() > 0.5
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)
    assert_same_gradients(gradients_of(ours, packed), gradients_of(plain, alone))


@pytest.mark.parametrize("family", EACH)
def test_a_critic_s_and_a_reward_model_s_outputs_and_gradients_are_transformers_own(family, tmp_path):
    """The head is new on a language model's files, is saved, and read again."""
    language_model(config_of(family, **DECODERS[family]), tmp_path / "lm")
    new = load_scalar_model(ModelConfig(path=str(tmp_path / "lm")), new_head=True)
    new.score.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    new.save_pretrained(tmp_path / "rm")
    ours = load_scalar_model(ModelConfig(path=str(tmp_path / "rm")), new_head=False).eval()
    backbone = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "lm", attn_implementation="sdpa" if family == "falcon" else "eager").eval()
    head, tokens, packing = new.score.weight.detach(), random_tokens(), Packing.of(np.array(LENGTHS))
    alone = torch.cat([backbone.get_decoder()(input_ids=row[None], use_cache=False).last_hidden_state[0]
                       for row in tokens.split(list(LENGTHS))]) @ head[0]
    outputs = PackedScalarModel(ours)(tokens, packing)
    assert alone.std() > 0.5
    torch.testing.assert_close(outputs, alone, atol=5e-5, rtol=1e-5)
    found, expected = gradients_of(ours, outputs), gradients_of(backbone, alone)
    found.pop("score.weight")
    assert_same_gradients(found, expected)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", EACH)
def test_tied_and_untied_models_are_right_in_bfloat16(family, tied, tmp_path):
    """As near to float32 as transformers' own model is, rows together as alone."""
    config = config_of(family, **DECODERS[family], tie_word_embeddings=tied)
    plain, tokens, packing = (language_model(config, tmp_path, torch.bfloat16), random_tokens(),
                              Packing.of(np.array(LENGTHS)))
    exact = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation=plain.config._attn_implementation).eval()
    ours = load_causal_lm(ModelConfig(path=str(tmp_path), dtype="bfloat16")).eval()
    assert (ours.get_output_embeddings().weight is ours.get_input_embeddings().weight) == (
        plain.get_output_embeddings().weight is plain.get_input_embeddings().weight)
    with torch.no_grad():
        packed, _ = PackedLanguageModel(ours)(tokens, packing, packing.positions.nonzero()[:, 0])
        alone, truth = logprobs_alone(plain, tokens), logprobs_alone(exact, tokens)
    assert float((packed - truth).abs().median()) < 1.5 * float((alone - truth).abs().median()) + 0.01


@pytest.mark.parametrize("scaling", SCALED)
def test_packed_rows_are_right_with_scaled_positions(scaling, tmp_path):
    family, rope = SCALED[scaling]
    shape = {**DECODERS[family], "rope_parameters": rope}
    packed, alone = packed_and_alone(config_of(family, **shape), tmp_path)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["granite", "cohere"])
def test_a_head_of_our_own_is_read_as_transformers_heads_are(family, tmp_path):
    """The recipe on the page of models, with transformers' own pooling."""
    language_model(config_of(family, **DECODERS[family]), tmp_path / "lm")
    new = load_scalar_model(ModelConfig(path=str(tmp_path / "lm")), new_head=True)
    new.save_pretrained(tmp_path / "rm")
    name = family.capitalize()
    theirs = type(f"{name}ForSequenceClassification", (
        GenericForSequenceClassification, getattr(transformers, f"{name}PreTrainedModel")), {})
    saved = json.loads((tmp_path / "rm" / "config.json").read_text())
    assert saved["architectures"] == [theirs.__name__] and saved["model_type"] == family
    model, row = theirs.from_pretrained(tmp_path / "rm").eval(), random_tokens()[:9]
    ours = load_scalar_model(ModelConfig(path=str(tmp_path / "rm")), new_head=False).eval()
    with torch.no_grad():
        score = PackedScalarModel(ours)(row, Packing.of(np.array([9])))[-1]
        torch.testing.assert_close(score, model(input_ids=row[None]).logits[0, 0], atol=1e-5, rtol=1e-5)


def saved(directory, family, **shape):
    """A model directory of which only the configuration is there: no check here reads more."""
    config_of(family, **shape).save_pretrained(directory)
    return ModelConfig(path=str(directory))


ROUTED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
REFUSED = [
    ("rwkv", {}, PACKED, "weights"),
    ("falcon", {"alibi": True}, DECODING, "ALiBi"), ("gpt_oss", {"tie_word_embeddings": True}, DECODING, "head"),
    *((name, {"tie_word_embeddings": False}, DECODING, "embedding for its head") for name in (
        "bloom", "cohere", "cohere2", "gemma2")),
    ("cohere2", {"sliding_window": 16}, DECODING, "one token wider .*16"),
    ("deepseek_v3", {**ROUTED, "tie_word_embeddings": True}, DECODING, "head"),
    ("deepseek_v3", {"scoring_func": "sigmoid"}, DECODING, "routes .*topk_method='noaux_tc' in"),
    ("deepseek_v3", {}, DECODING, "scoring_func='sigmoid' and topk_method"),
    ("bert", {}, PACKED, "both directions"),
    ("gemma3_text", {"use_bidirectional_attention": True}, PACKED, "later"),
]


@pytest.mark.parametrize(("family", "shape", "uses", "reason"), REFUSED)
def test_what_is_known_not_to_work_is_refused_by_name_and_reason(family, shape, uses, reason, tmp_path):
    model = saved(tmp_path, family, **shape)
    for use in uses:
        said = (rf"^model: '{re.escape(model.path)}' is of the family '{family}', which cannot be used for .*"
                f"(?:{reason}).*Use a model of a family that can: .*llama.*docs/models.md")
        with pytest.raises(ModelError, match=said):
            check_family(model, "model", {use})


def test_a_window_that_only_a_pattern_gives_is_refused_too(tmp_path):
    """Published configurations have `sliding_window_pattern` and no `layer_types`."""
    model = saved(tmp_path, "cohere2", sliding_window=16)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps({**values, "sliding_window_pattern": 4}))
    with pytest.raises(ModelError, match="one token wider"):
        check_family(model, "model", DECODING)


def test_a_language_model_within_a_multimodal_one_is_not_generated_with(tmp_path):
    model = saved(tmp_path, "gemma3")
    with pytest.raises(ModelError, match=r"'gemma3', which cannot be used for .*within a multimodal one \(text_config"):
        check_family(model, "model", DECODING)
    check_family(model, "model", PACKED)


@pytest.mark.parametrize(("family", "shape", "uses"), [
    *((name, DECODERS[name], POLICY | PACKED) for name in (
        "cohere", "gemma", "gemma2", "gemma3_text", "glm4", "gpt2", "granite", "llama", "mistral", "nemotron", "opt",
        "phi3", "qwen2", "qwen3", "stablelm")),
    ("falcon", {}, POLICY | PACKED), ("mixtral", {}, POLICY | PACKED), ("olmo2", {}, POLICY | PACKED),
    ("mamba", {}, PACKED), ("bloom", {}, POLICY | PACKED), ("gpt_oss", {}, POLICY | PACKED),
    ("cohere2", {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}, POLICY | PACKED),
    ("deepseek_v3", ROUTED, POLICY | PACKED), ("olmoe", {}, POLICY | PACKED), ("seed_oss", {}, POLICY | PACKED),
])
def test_what_is_right_or_not_known_is_let_through(family, shape, uses, tmp_path):
    check_family(saved(tmp_path, family, **shape), "model", uses, (32, "data.max_tokens"))


@pytest.mark.parametrize(("family", "shape", "what"), [
    ("phi3", {"original_max_position_embeddings": 16, "rope_parameters": {
        **LONG, "short_factor": [1.0] * 48, "long_factor": [1.0] * 48, "original_max_position_embeddings": 16}},
     "context before longrope rope scaling"),
    ("llama", {"max_position_embeddings": 16, "rope_parameters": DYNAMIC}, "context before dynamic rope scaling"),
])
def test_rows_longer_than_passes_are_right_for_are_refused(family, shape, what, tmp_path):
    model = saved(tmp_path, family, **shape)
    check_family(model, "model", PACKED, (16, "data.max_tokens"))
    check_family(model, "model", {Use.GENERATION}, (17, "data.max_tokens"))
    with pytest.raises(ModelError, match=rf"^data\.max_tokens=17 tokens is over the {what} of .*, 16: .*; lower it"):
        check_family(model, "model", PACKED, (17, "data.max_tokens"))


@pytest.mark.parametrize(("family", "shape", "padded"), [
    ("llama", {}, False), ("mistral", {"sliding_window": 16}, False), ("seed_oss", {}, False), ("bloom", {}, True),
    ("mamba", {}, True), ("gptj", {}, True), ("bert", {}, True), ("t5", {}, True),
    ("qwen2_moe", {"sliding_window": 16, "use_sliding_window": False}, False),
    ("qwen2_moe", {"sliding_window": 16, "use_sliding_window": True}, True),
    ("phimoe", {"sliding_window": 16}, True), ("llama4_text", {"attention_chunk_size": 16}, True),
    ("gemma3_text", {"use_bidirectional_attention": True}, True),
])
def test_rows_are_padded_where_packed_attention_does_not_receive_what_it_needs(family, shape, padded):
    assert bool(why_padded(config_of(family, **shape))) == padded


def test_every_family_is_on_the_page_of_models():
    page = (ROOT / "docs" / "models.md").read_text()
    assert not [name for name in FAMILIES if f"`{name}`" not in page]
