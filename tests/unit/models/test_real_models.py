"""Models as people have them through everything that touches a model: read, packed, exported, read again."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from rlhf_ray.checkpoint.export import export_model
from rlhf_ray.checkpoint.model_card import ModelCardInfo
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.answers import stop_tokens
from rlhf_ray.models.loading import (
    load_causal_lm,
    load_scalar_model,
    load_tokenizer,
    parameter_shapes,
    stored_precisions,
)
from rlhf_ray.models.model_families import POLICY, Use, check_family
from rlhf_ray.models.packed_model import PackedLanguageModel, PackedScalarModel
from rlhf_ray.models.packing import Packing
from rlhf_ray.models.stop_tokens import named_stop_tokens
from rlhf_ray.stages.preflight import check_model
from rlhf_ray.weights.manifest import plan_buckets
from tests.real_models import KINDS, PADDED, make_real_model, stop_ids

LENGTHS = (7, 1, 90, 20)
CARD = ModelCardInfo(stage="sft", step=1, trained_on="rows", metrics={}, base_model="scratch")


@pytest.fixture(scope="module", params=KINDS)
def real(request, tmp_path_factory) -> tuple[str, ModelConfig]:
    """(kind, model)."""
    kind = request.param
    return kind, ModelConfig(path=str(make_real_model(tmp_path_factory.mktemp("real") / kind, kind)))


def rows():
    """[T] token ids of rows, ids without a word among them; their packing."""
    tokens = torch.randint(0, PADDED, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    return tokens, Packing.of(np.array(LENGTHS))


def each_alone(model, tokens):
    """[T, ...] what transformers' own model answers to every row by itself."""
    with torch.no_grad():
        return torch.cat([model(input_ids=row[None], use_cache=False)[0][0] for row in tokens.split(list(LENGTHS))])


def test_it_is_what_it_should_look_like_and_passes_preflight(real):
    kind, model = real
    index = json.loads((Path(model.path) / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert len(load_tokenizer(model)) < PADDED and len(stop_ids(kind)) > 1
    check_model(model, "model")
    check_family(model, "model", {*POLICY, Use.SCALAR}, (256, "data.max_tokens"))
    assert stored_precisions(model) == {torch.float32}


@pytest.mark.parametrize("mapped", [False, True])
def test_packed_passes_are_transformers_own(real, mapped):
    _, config = real
    tokens, packing = rows()
    plain = transformers.AutoModelForCausalLM.from_pretrained(config.path, attn_implementation="eager").eval()
    predicted = packing.positions.nonzero()[:, 0]
    with torch.no_grad():
        found, _ = PackedLanguageModel(load_causal_lm(config, mapped).eval())(tokens, packing, predicted)
    expected = each_alone(plain, tokens).log_softmax(-1)[predicted - 1].gather(1, tokens[predicted, None])[:, 0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_scalar_head_on_packed_rows_is_transformers_own(real):
    _, config = real
    tokens, packing = rows()
    model = load_scalar_model(config, new_head=True).eval()
    plain = transformers.AutoModel.from_pretrained(config.path, attn_implementation="eager").eval()
    with torch.no_grad():
        found = PackedScalarModel(model)(tokens, packing)
        expected = model.score(each_alone(plain, tokens))[:, 0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_an_export_keeps_what_the_model_came_with(real, tmp_path):
    """All embeddings, the template, the ids that end a response and the rest of generation_config.json as it was."""
    kind, config = real
    model = load_causal_lm(config)
    changed = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    export_model(model, changed, load_tokenizer(config), tmp_path / "model", CARD)
    again = ModelConfig(path=str(tmp_path / "model"))
    check_model(again, "model")
    reloaded = load_causal_lm(again)
    assert reloaded.get_input_embeddings().weight.shape[0] == PADDED
    for name, tensor in reloaded.state_dict().items():
        torch.testing.assert_close(tensor, changed[name], atol=0, rtol=0)
    assert reloaded.config.to_dict() == {**model.config.to_dict(), "_name_or_path": reloaded.config.name_or_path}
    given, kept = ({key: value for key, value in json.loads((Path(path) / "generation_config.json").read_text()).items()
                    if key != "transformers_version"} for path in (config.path, again.path))
    assert kept == given, "what transformers would not write is kept too"
    tokenizer = load_tokenizer(again)
    assert tokenizer.chat_template == KINDS[kind]["template"]
    assert tokenizer("w1 w2").input_ids == load_tokenizer(config)("w1 w2").input_ids
    assert stop_tokens(tokenizer, named_stop_tokens(tokenizer, again)) == stop_ids(kind)


def test_every_stop_id_of_the_generation_config_ends_a_response(real):
    kind, config = real
    tokenizer = load_tokenizer(config)
    assert stop_tokens(tokenizer, named_stop_tokens(tokenizer, config)) == stop_ids(kind)


def test_a_publication_brings_all_embeddings_and_tied_weights_once(real):
    kind, config = real
    model = load_causal_lm(config)
    own = [(name, tuple(p.shape), "float32") for name, p in model.named_parameters()]
    assert {name: shape for name, shape, _ in own} == parameter_shapes(model.config)
    assert sum(shape[0] == PADDED for _, shape, _ in own) == (1 if kind in ("qwen", "gemma") else 2)
    planned = [entry.name for bucket in plan_buckets(own, 2**16) for entry in bucket]
    assert sorted(planned) == sorted(name for name, *_ in own)
