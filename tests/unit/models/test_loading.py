"""Models by path: what loads, and the words for what does not."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from rlhf_ray.config.model import ArchitectureConfig, ModelConfig, NewModelConfig
from rlhf_ray.errors import ConfigError, ModelError
from rlhf_ray.models.attention import NAME
from rlhf_ray.models.loading import (
    check_model_directory,
    check_scalar_head,
    label_names,
    load_causal_lm,
    load_scalar_model,
    load_tokenizer,
    remove_dropout,
    stored_precisions,
)
from tests.models import make_tiny_llama


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "llama", vocab=40, hidden=32, heads=1)


@pytest.fixture
def copy(llama, tmp_path):
    """A copy of the model to damage."""
    return shutil.copytree(llama, tmp_path / "copy")


def config(path, **more):
    return ModelConfig(path=str(path), **more)


def test_a_whole_model_directory_passes(llama):
    check_model_directory(config(llama), "model")


def test_a_missing_directory_is_named_with_its_field(tmp_path):
    gone = tmp_path / "gone"
    with pytest.raises(ModelError, match=rf"^reward_model\.path='{gone}': no such directory \(relative paths"):
        check_model_directory(config(gone), "reward_model")


@pytest.mark.parametrize("path", ["./gone", "gone", "a/b/c", "runs/gone"])
def test_what_cannot_be_a_hub_name_is_a_missing_directory(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(ModelError, match="no such directory"):
        check_model_directory(config(path), "model")


def test_a_directory_without_config_is_no_model(copy):
    (copy / "config.json").unlink()
    with pytest.raises(ModelError, match=r"^model\.path='.*copy' has no config\.json"):
        check_model_directory(config(copy), "model")


def test_pickled_weights_are_refused(copy):
    (copy / "model.safetensors").unlink()
    torch.save({}, copy / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"^model\.path='.*copy' has no \*\.safetensors.*`save_pretrained`"):
        check_model_directory(config(copy), "model")
    with pytest.raises(ModelError, match=r"no model could be loaded from '.*copy'"):
        load_causal_lm(config(copy))


def test_a_loaded_model_has_the_saved_weights_dtype_and_attention(llama):
    from safetensors.torch import load_file

    model = load_causal_lm(config(llama))
    saved = load_file(llama / "model.safetensors")
    assert model.config._attn_implementation == NAME
    for name, tensor in saved.items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert load_causal_lm(config(llama, dtype="bfloat16")).dtype == torch.bfloat16


def test_a_damaged_model_is_told_with_its_path(copy):
    (copy / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no model could be loaded from '.*copy': \S"):
        load_causal_lm(config(copy))


def without_weights(directory, part):
    """The model without its weights of which the name contains `part`."""
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    save_file({name: w for name, w in load_file(file).items() if part not in name}, file, metadata={"format": "pt"})
    return directory


def test_weights_that_the_files_lack_are_named_and_never_random(copy):
    said = r"'.*copy' has no weights for model\.layers\.1\..* and \d+ more of LlamaForCausalLM, which would be random"
    with pytest.raises(ModelError, match=said):
        load_causal_lm(config(without_weights(copy, "layers.1.")))


@pytest.mark.parametrize("mapped", [False, True])
def test_a_reward_model_without_its_head_is_refused_unless_it_gets_a_new_one(copy, mapped):
    """Its configuration says that it is a classifier, and its head has another name."""
    model = config(without_weights(classifier(copy, 1), "score"))
    assert load_scalar_model(model, new_head=True, mapped=mapped).score.weight.std() > 0
    with pytest.raises(ModelError, match=r"has no weights for score\.weight of LlamaForSequenceClassification"):
        load_scalar_model(model, new_head=False, mapped=mapped)


@pytest.mark.parametrize("random", [
    ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 2}),
    ("llama", {"attention_dropout": 0.3}),
    ("opt", {"word_embed_proj_dim": 32, "ffn_dim": 64, "layerdrop": 0.5, "dropout": 0.2}),
])
def test_dropout_of_the_model_s_own_is_removed(random):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    family, entries = random
    shape = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
    drawn = AutoConfig.for_model(family, vocab_size=50, **(entries if family == "gpt2" else shape | entries))
    tokens, model = torch.arange(2, 20)[None], AutoModelForCausalLM.from_config(drawn).train()
    assert not torch.equal(model(tokens).logits, model(tokens).logits)
    before = model.config.to_dict()
    remove_dropout(model)
    with torch.no_grad():
        passes = [model(tokens).logits for _ in range(3)]
    torch.testing.assert_close(passes[1], passes[0], rtol=0, atol=0)
    torch.testing.assert_close(model.eval()(tokens).logits, passes[2], rtol=0, atol=1e-6)
    assert model.config.to_dict() == before, "an export has the configuration that was loaded"


def test_dropout_that_layers_read_from_the_configuration_is_refused():
    from transformers import FalconConfig, FalconForCausalLM

    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
    with pytest.raises(ModelError, match="drops parts at random.*set attention_dropout and hidden_dropout to 0"):
        remove_dropout(FalconForCausalLM(FalconConfig(hidden_dropout=0.1, attention_dropout=0.1, **shape)))
    remove_dropout(FalconForCausalLM(FalconConfig(**shape)))


def test_a_language_model_is_no_reward_model(llama):
    said = r"is not a reward model: it has architectures \['LlamaForCausalLM'\].*reward-model"
    with pytest.raises(ModelError, match=said):
        load_scalar_model(config(llama), new_head=False)


def test_a_reward_model_whose_configuration_says_nothing_is_told_with_its_path(copy):
    (copy / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(ModelError, match=r"no model could be loaded from '.*copy': \S"):
        load_scalar_model(config(copy), new_head=False)


def classifier(directory, labels):
    from transformers import LlamaForSequenceClassification

    LlamaForSequenceClassification.from_pretrained(directory, num_labels=labels).save_pretrained(directory)
    return directory


def test_a_classifier_with_two_labels_is_no_reward_model(copy):
    said = r"has 2 labels \(0 'LABEL_0', 1 'LABEL_1'\), and a reward is one number: set rewards\.NAME\.label to one"
    with pytest.raises(ModelError, match=said):
        load_scalar_model(config(classifier(copy, 2)), new_head=False)


NAMES = {0: "negative", 1: "neutral", 2: "1"}


@pytest.mark.parametrize(("label", "number"), [("neutral", 1), (1, 1), ("0", 0), ("1", 2)])
def test_a_label_is_named_or_counted(label, number, copy):
    from transformers import LlamaForSequenceClassification

    LlamaForSequenceClassification.from_pretrained(copy, num_labels=3, id2label=NAMES).save_pretrained(copy)
    assert label_names(config(copy)) == list(NAMES.values())
    assert check_scalar_head(config(copy), "rewards.tone", label) == number


@pytest.mark.parametrize("label", ["positive", 3, -1])
def test_a_label_that_the_classifier_does_not_have_is_refused_with_those_it_has(label, copy):
    said = rf"^rewards\.tone\.label={label!r} is not a label of '.*copy', which has 0 'LABEL_0', 1 'LABEL_1'; set it"
    with pytest.raises(ModelError, match=said):
        check_scalar_head(config(classifier(copy, 2)), "rewards.tone", label)


def test_a_reward_model_keeps_its_head(copy):
    from safetensors.torch import load_file

    model = load_scalar_model(config(classifier(copy, 1)), new_head=False)
    assert torch.equal(model.score.weight, load_file(copy / "model.safetensors")["score.weight"])
    assert model.score.weight.shape == (1, 32)


def test_a_new_head_is_small_random_and_follows_the_seed(copy):
    heads = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        heads.append(load_scalar_model(config(copy), new_head=True).score.weight)
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert heads[0].std().item() == pytest.approx(33**-0.5, rel=0.4)  # 32 draws


def test_a_new_head_replaces_one_that_is_there(copy):
    from safetensors.torch import load_file

    model = load_scalar_model(config(classifier(copy, 1)), new_head=True)
    assert not torch.equal(model.score.weight, load_file(copy / "model.safetensors")["score.weight"])


def test_a_new_model_has_the_shape_asked_for(llama):
    shape = ArchitectureConfig(hidden_size=16, layers=3, heads=4, kv_heads=2, intermediate_size=40, max_positions=64,
                               tie_embeddings=False, initializer_range=0.1)
    new = NewModelConfig(architecture=shape, tokenizer=str(llama))
    torch.manual_seed(0)
    model = load_causal_lm(new)
    assert model.get_input_embeddings().weight.shape == (40, 16)
    assert len(model.model.layers) == 3
    assert model.model.layers[0].self_attn.k_proj.weight.shape == (8, 16)
    assert model.model.layers[0].mlp.up_proj.weight.shape == (40, 16)
    assert model.config.max_position_embeddings == 64 and model.config.eos_token_id == 1
    assert model.lm_head.weight is not model.get_input_embeddings().weight
    assert model.lm_head.weight.std().item() == pytest.approx(0.1, rel=0.1)  # 640 draws
    torch.manual_seed(0)
    assert torch.equal(load_causal_lm(new).lm_head.weight, model.lm_head.weight)


NEW = {"qwen2": "Qwen2ForCausalLM", "gemma2": "Gemma2ForCausalLM", "mixtral": "MixtralForCausalLM"}


def new_model(tokenizer, family):
    shape = ArchitectureConfig(family=family, hidden_size=64, layers=2, heads=2, kv_heads=1, intermediate_size=96,
                               max_positions=64)
    torch.manual_seed(0)
    return load_causal_lm(NewModelConfig(architecture=shape, tokenizer=str(tokenizer)))


@pytest.mark.parametrize("family", NEW)
def test_a_new_model_of_another_family_is_saved_and_loaded_as_one(family, llama, tmp_path):
    model = new_model(llama, family)
    assert type(model).__name__ == NEW[family] and model.config.model_type == family
    assert model.model.layers[0].self_attn.k_proj.weight.shape == (32, 64)
    model.save_pretrained(tmp_path)
    again = load_causal_lm(config(tmp_path)).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


def test_new_models_have_what_their_families_are_about(llama):
    assert new_model(llama, "qwen2").model.layers[0].self_attn.q_proj.bias is not None
    gemma = new_model(llama, "gemma2")
    assert gemma.config.attn_logit_softcapping == 50 and gemma.config.final_logit_softcapping == 30
    assert gemma.model.layers[0].self_attn.scaling == 32**-0.5
    experts = new_model(llama, "mixtral").model.layers[0].mlp
    assert experts.gate.weight.shape == (4, 64) and experts.gate.top_k == 2


def test_a_new_llama_is_transformers_own_bit_for_bit(llama):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = new_model(llama, "llama")
    torch.manual_seed(0)
    own = LlamaForCausalLM(LlamaConfig(
        vocab_size=40, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=96, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1,
        pad_token_id=0))
    assert model.config.to_dict() == own.config.to_dict()
    assert all(torch.equal(tensor, own.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_a_new_gemma_2_without_a_shared_embedding_is_refused():
    with pytest.raises(ConfigError, match="tie_embeddings=false cannot be combined with family=gemma2"):
        ArchitectureConfig(family="gemma2", tie_embeddings=False)


def test_a_tokenizer_comes_from_where_the_configuration_says(llama, tmp_path):
    assert load_tokenizer(config(llama)).eos_token_id == 1
    assert load_tokenizer(config("no/such", tokenizer=str(llama))).eos_token_id == 1
    with pytest.raises(ModelError, match="no tokenizer could be loaded from"):
        load_tokenizer(config(tmp_path))


def test_a_tokenizer_without_an_end_is_refused(copy):
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    settings.pop("eos_token")
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    (copy / "special_tokens_map.json").unlink(missing_ok=True)
    with pytest.raises(ModelError, match="has no end-of-sequence token.*Set `eos_token`"):
        load_tokenizer(config(copy))


def test_foreign_code_needs_a_pinned_revision():
    with pytest.raises(ConfigError, match="pin it with `revision`"):
        ModelConfig(path="a/b", trust_remote_code=True)
    for movable in ("main", "v1.0", "0123abc", "0" * 39 + "g"):
        with pytest.raises(ConfigError, match="40 hex digits"):
            ModelConfig(path="a/b", trust_remote_code=True, revision=movable)
    commit = "0123456789" * 4
    pinned = ModelConfig(path="a/b", trust_remote_code=True, revision=commit)
    assert pinned.trust == {"revision": commit, "trust_remote_code": True, "code_revision": commit}
    assert ModelConfig(path="a/b", revision="main").trust == {"revision": "main", "trust_remote_code": False}


def stored(path, **dtypes):
    """Rewrite a model's weights in bfloat16, those named here in another precision."""
    from safetensors.torch import load_file, save_file

    weights = {name: w.to(dtypes.get(name.split(".")[-2], torch.bfloat16))
               for name, w in load_file(path / "model.safetensors").items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**settings, "dtype": "bfloat16"}))
    return path


def test_a_mapped_model_is_its_files_pages_in_their_precision(copy):
    plain, mapped = load_causal_lm(config(stored(copy))), load_causal_lm(config(copy), mapped=True)
    assert (plain.dtype, mapped.dtype) == (torch.float32, torch.bfloat16)
    for (name, weight), (_, pages) in zip(plain.named_parameters(), mapped.named_parameters(), strict=True):
        assert torch.equal(weight, pages.float()), name
    assert str(copy / "model.safetensors") in Path("/proc/self/maps").read_text()


def test_files_of_several_precisions_lose_nothing(copy):
    stored(copy, norm=torch.float32)
    assert stored_precisions(config(copy)) == {torch.bfloat16, torch.float32}
    assert load_causal_lm(config(copy), mapped=True).dtype is torch.float32


def test_a_new_head_is_drawn_in_float32_whatever_the_files_have(copy):
    heads = []
    for path in (copy, stored(copy)):
        torch.manual_seed(3)
        model = load_scalar_model(config(path), new_head=True, mapped=True)
        heads.append(model.score.weight)
    assert [head.dtype for head in heads] == [torch.float32, torch.float32]
    assert len(set(heads[1].flatten().tolist()) - set(heads[1].bfloat16().float().flatten().tolist())) > 1
