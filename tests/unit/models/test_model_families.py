"""What is known of model families: right on packed rows, or refused by name and before anything starts."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import ModelError
from rlhf_ray.models.loading import load_causal_lm
from rlhf_ray.models.model_families import DECODING, FAMILIES, PACKED, POLICY, Use, check_family
from rlhf_ray.models.packed_model import PackedLanguageModel
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


def packed_and_alone(config, directory):
    """[n] log-probabilities of all tokens but rows' first, packed; and by transformers' own model, a row at a time."""
    plain = randomised(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    plain.save_pretrained(directory)
    tokens = torch.randint(2, 64, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    packing, alone = Packing.of(np.array(LENGTHS)), []
    with torch.no_grad():
        for row in tokens.split(list(LENGTHS)):
            scores = plain(input_ids=row[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            alone.append(scores.gather(1, row[1:, None])[:, 0])
        packed, _ = PackedLanguageModel(load_causal_lm(ModelConfig(path=str(directory))).eval())(
            tokens, packing, packing.positions.nonzero()[:, 0])
    return packed, torch.cat(alone)


def test_what_is_listed_as_right_is_tested_here_and_only_that():
    assert {name for name, family in FAMILIES.items() if Use.LANGUAGE in family.supported} == set(DECODERS)
    assert not any(family.supported & family.refused.keys() for family in FAMILIES.values())


@pytest.mark.parametrize("family", DECODERS)
def test_packed_rows_are_transformers_own_answers(family, tmp_path):
    packed, alone = packed_and_alone(config_of(family, **DECODERS[family]), tmp_path)
    assert alone.std() > 0.5
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("scaling", SCALED)
def test_packed_rows_are_right_with_scaled_positions(scaling, tmp_path):
    family, rope = SCALED[scaling]
    shape = {**DECODERS[family], "rope_parameters": rope}
    packed, alone = packed_and_alone(config_of(family, **shape), tmp_path)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)


def saved(directory, family, **shape):
    """A model directory of which only the configuration is there: no check here reads more."""
    config_of(family, **shape).save_pretrained(directory)
    return ModelConfig(path=str(directory))


ROUTED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
REFUSED = [
    ("gemma2", {}, PACKED, "softcapping"), ("vaultgemma", {}, PACKED, "softcapping"),
    ("nanochat", {}, {Use.LANGUAGE}, "final_logit_softcapping"),
    ("cohere", {}, {Use.LANGUAGE}, "logit_scale"), ("cohere", {}, {Use.SCALAR}, "sequence classifier"),
    ("cohere2", {}, {Use.LANGUAGE}, "logit_scale"), ("cohere2", {}, {Use.SCALAR}, "sequence classifier"),
    ("granite", {"logits_scaling": 4.0}, {Use.LANGUAGE}, "logits_scaling=4.0"),
    ("granite", {}, {Use.SCALAR}, "sequence classifier"),
    ("gpt_oss", {}, PACKED, "sinks"), ("bloom", {}, PACKED, "interface"),
    ("falcon", {}, PACKED, "interface"),
    ("mpt", {}, PACKED, "interface"), ("mamba", {}, PACKED, "state"), ("qwen3_next", {}, PACKED, "state"),
    ("nemotron", {}, PACKED, "row boundaries"),
    ("falcon", {"alibi": True}, DECODING, "ALiBi"), ("gpt_oss", {"tie_word_embeddings": True}, DECODING, "head"),
    *((name, {"tie_word_embeddings": False}, DECODING, "embedding for its head") for name in (
        "cohere", "cohere2", "gemma2")),
    ("deepseek_v3", {**ROUTED, "tie_word_embeddings": True}, DECODING, "head"),
    ("deepseek_v3", {"scoring_func": "sigmoid"}, DECODING, "routes .*topk_method='noaux_tc' in"),
    ("deepseek_v3", {}, DECODING, "scoring_func='sigmoid' and topk_method"),
    ("bert", {}, PACKED, "both directions"), ("olmoe", {}, {Use.SCALAR}, "sequence classifier"),
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


@pytest.mark.parametrize(("family", "shape", "uses"), [
    *((name, DECODERS[name], POLICY | PACKED) for name in (
        "gemma", "gemma3_text", "glm4", "gpt2", "llama", "mistral", "opt", "phi3", "qwen2", "qwen3")),
    ("granite", {}, POLICY), ("mixtral", {}, POLICY | PACKED), ("olmo2", {}, POLICY | PACKED),
    ("gemma2", {}, DECODING), ("cohere", {}, DECODING), ("falcon", {}, DECODING), ("bloom", {}, DECODING),
    ("gpt_oss", {}, DECODING), ("deepseek_v3", ROUTED, DECODING),
    ("olmoe", {}, POLICY), ("seed_oss", {}, POLICY | PACKED),
])
def test_what_is_right_or_not_known_is_let_through(family, shape, uses, tmp_path):
    check_family(saved(tmp_path, family, **shape), "model", uses, (32, "data.max_tokens"))


@pytest.mark.parametrize(("family", "shape", "what"), [
    ("mistral", {"sliding_window": 16}, "sliding window"), ("qwen2", {"sliding_window": 16, "use_sliding_window": True,
     "max_window_layers": 0}, "sliding window"), ("gemma3_text", {"sliding_window": 16}, "sliding window"),
    ("phi3", {"original_max_position_embeddings": 16, "rope_parameters": {
        **LONG, "short_factor": [1.0] * 48, "long_factor": [1.0] * 48, "original_max_position_embeddings": 16}},
     "context before longrope rope scaling"),
    ("llama", {"max_position_embeddings": 16, "rope_parameters": DYNAMIC}, "context before dynamic rope scaling"),
])
def test_rows_longer_than_packed_passes_are_right_for_are_refused(family, shape, what, tmp_path):
    model = saved(tmp_path, family, **shape)
    check_family(model, "model", PACKED, (16, "data.max_tokens"))
    check_family(model, "model", {Use.GENERATION}, (17, "data.max_tokens"))
    with pytest.raises(ModelError, match=rf"^data\.max_tokens=17 tokens is over the {what} of .*, 16: .*; lower it"):
        check_family(model, "model", PACKED, (17, "data.max_tokens"))


@pytest.mark.parametrize(("shape", "refused"), [
    ({"sliding_window": 16, "use_sliding_window": False}, False),
    ({"sliding_window": 16, "use_sliding_window": True, "layer_types": ["full_attention"] * 2}, False),
    ({"sliding_window": 16, "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}, True),
])
def test_a_window_counts_where_a_layer_has_it(shape, refused, tmp_path):
    config_of("qwen2", **DECODERS["qwen2"]).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "layer_types": None, **shape}))
    if not refused:
        check_family(ModelConfig(path=str(tmp_path)), "model", PACKED, (20, "data.max_tokens"))
        return
    with pytest.raises(ModelError, match="sliding window"):
        check_family(ModelConfig(path=str(tmp_path)), "model", PACKED, (20, "data.max_tokens"))


def test_what_config_json_leaves_out_is_as_transformers_has_it(tmp_path):
    """Mistral's own default is a window of 4,096 tokens."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    with pytest.raises(ModelError, match="sliding window of .*, 4096"):
        check_family(ModelConfig(path=str(tmp_path)), "model", PACKED, (5000, "data.max_tokens"))


def test_every_family_is_on_the_page_of_models():
    page = (ROOT / "docs" / "models.md").read_text()
    assert not [name for name in FAMILIES if f"`{name}`" not in page]
