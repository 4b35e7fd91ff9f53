"""Exported models load in transformers and compute what the trained ones did."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from rlhf_ray.checkpoint import export
from rlhf_ray.checkpoint.export import export_model
from rlhf_ray.checkpoint.model_card import ModelCardInfo, model_card
from rlhf_ray.data.tokenizer import ADDED_PAD, tokenizer_digest
from rlhf_ray.errors import CheckpointError
from rlhf_ray.models.packed_model import PackedScalarModel, last_token_scores
from rlhf_ray.models.packing import Packing
from tests.models import make_tiny_llama
from tests.tiny_families import DECODERS, config_of

TOKENS = torch.tensor([[5, 9, 7, 3, 11]])


def card(stage="ppo", **kwargs):
    return ModelCardInfo(
        stage=stage,
        step=12,
        base_model="models/start",
        trained_on="reviews.jsonl, 100 prompts",
        metrics={"reward": 1.25, "kl": 0.5},
        **kwargs,
    )


@pytest.mark.parametrize(("method", "tag"), [
    ("GRPO", "grpo"), ("PPO from human feedback", "ppo"), ("REINFORCE++-baseline", "reinforce++-baseline")])
def test_the_card_names_what_the_run_did(method, tag):
    made = model_card(card(method=method), "mine")
    assert f"Trained by {method} with `rlhf_ray` {version('rlhf-ray')}, 12 updates" in made.text
    assert tag in made.data.tags


@pytest.fixture(params=["tied", "untied", "reward"])
def trained(request, tmp_path):
    """A model with its tokenizer, and the class that should load its export."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    source = make_tiny_llama(tmp_path / "source", vocab=64, tied=request.param == "tied", hidden=32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    if request.param == "reward":
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1)
        return model.eval(), tokenizer, AutoModelForSequenceClassification
    return AutoModelForCausalLM.from_pretrained(source).eval(), tokenizer, AutoModelForCausalLM


def cloned(model):
    """Weights as a gather delivers them: own memory each, tied ones twice."""
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def exported(model, weights, tokenizer, directory, info):
    export_model(model, weights, tokenizer, directory, info)
    return directory


def stored(directory: Path):
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        return set(file.keys())


def tiny(tmp_path, tied=True):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = make_tiny_llama(tmp_path / "tiny", vocab=64, tied=tied, hidden=32)
    return AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)


@pytest.mark.parametrize("gathered", [True, False])
def test_an_export_computes_the_same_logits(trained, tmp_path, gathered):
    model, tokenizer, auto = trained
    weights = cloned(model) if gathered else model.state_dict()
    directory = exported(model, weights, tokenizer, tmp_path / "model", card())
    loaded, info = auto.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        expected, actual = model(TOKENS).logits, loaded.eval()(TOKENS).logits
    # The weights are the same to the bit; sums may differ in the last one, where memory is aligned differently.
    assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in model.state_dict().items())
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    assert expected.abs().max() > 0.01
    assert type(loaded) is type(model)


ROWS = ["w5 w6 w7 </s>", "w9 </s>", "w3 w4 w5 w6 w8"]
"""Two finished responses, and one that was cut."""


def classifier(tmp_path, pad, rows=64, family="llama"):
    """A reward model with random weights and a tokenizer of 64 tokens, with this padding token."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_tiny_llama(tmp_path / "words", vocab=64, hidden=32, heads=1))
    tokenizer.pad_token, tokenizer.padding_side, tokenizer.init_kwargs["padding_side"] = pad, "left", "left"
    torch.manual_seed(0)
    shape = {**DECODERS[family], "pad_token_id": tokenizer.pad_token_id, "vocab_size": rows}
    return AutoModelForSequenceClassification.from_config(config_of(family, **shape)).eval(), tokenizer


def scores_of_last_tokens(model, tokenizer):
    ids = [tokenizer(row)["input_ids"] for row in ROWS]
    packing = Packing.of(np.array([len(row) for row in ids]), "cpu")
    with torch.no_grad():
        return last_token_scores(PackedScalarModel(model)(torch.tensor([i for row in ids for i in row]), packing),
                                 packing)


@pytest.mark.parametrize("pad, rows, named", [
    ("</s>", 64, ADDED_PAD), (None, 64, ADDED_PAD), ("</s>", 96, ADDED_PAD), ("<pad>", 64, "<pad>"),
])
def test_transformers_scores_an_exported_reward_model_at_the_last_token(tmp_path, pad, rows, named):
    """Plain transformers, one row at a time and together, whatever the base model pads with."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, tokenizer = classifier(tmp_path, pad, rows)
    before = (tokenizer.pad_token, len(tokenizer), model.config.pad_token_id, model.config.vocab_size)
    directory = exported(model, cloned(model), tokenizer, tmp_path / "model", card("reward_model"))
    assert (tokenizer.pad_token, len(tokenizer), model.config.pad_token_id, model.config.vocab_size) == before
    loaded, info = AutoModelForSequenceClassification.from_pretrained(directory, output_loading_info=True)
    words = AutoTokenizer.from_pretrained(directory)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert (words.pad_token, words.padding_side) == (named, "right")
    assert words.pad_token_id == loaded.config.pad_token_id < loaded.config.vocab_size
    assert loaded.config.vocab_size == max(rows, words.pad_token_id + 1)
    expected = scores_of_last_tokens(model, tokenizer)
    with torch.no_grad():
        apart = torch.cat([loaded(**words(row, return_tensors="pt")).logits[:, 0] for row in ROWS])
        together = loaded(**words(ROWS, padding=True, return_tensors="pt")).logits[:, 0]
        left = loaded(**words(ROWS, padding=True, padding_side="left", return_tensors="pt")).logits[:, 0]
    for scores in (apart, together, left):
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
    if pad is not None:
        with torch.no_grad():
            plain = model(**tokenizer(ROWS, padding=True, return_tensors="pt")).logits[:, 0]
        assert (pad == "</s>") == bool((plain - expected).abs()[:2].min() > 1e-2), "that is what the base would give"


def test_a_padding_token_that_ends_or_begins_rows_or_stands_in_the_template_is_replaced(tmp_path):
    from transformers import AutoTokenizer

    model, tokenizer = classifier(tmp_path, "w7")

    def pads_with(**settings):
        for name, value in settings.items():
            setattr(model.config if name.endswith("_id") else tokenizer, name, value)
        directory = exported(model, cloned(model), tokenizer, tmp_path / "model", card("reward_model"))
        return AutoTokenizer.from_pretrained(directory).pad_token

    assert pads_with() == "w7"
    assert pads_with(eos_token_id=[1, 7]) == ADDED_PAD
    assert pads_with(eos_token_id=1, bos_token_id=7) == ADDED_PAD
    assert pads_with(bos_token_id=None, unk_token="w7") == ADDED_PAD
    assert pads_with(unk_token=None, chat_template="{{ messages[0].content }}w7") == ADDED_PAD
    assert pads_with(chat_template=None) == "w7"


def test_a_family_that_counts_positions_from_the_first_column_scores_alike_with_the_padding_of_its_export(tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, tokenizer = classifier(tmp_path, "</s>", family="gpt2")
    directory = exported(model, cloned(model), tokenizer, tmp_path / "model", card("reward_model"))
    loaded = AutoModelForSequenceClassification.from_pretrained(directory)
    words = AutoTokenizer.from_pretrained(directory)
    with torch.no_grad():
        together = loaded(**words(ROWS, padding=True, return_tensors="pt")).logits[:, 0]
        expected = [loaded.score(loaded.base_model(**words(row, return_tensors="pt")).last_hidden_state)[0, -1, 0]
                    for row in ROWS]
    torch.testing.assert_close(together, torch.stack(expected), rtol=1e-4, atol=1e-5)
    assert "padded by this directory's tokenizer, on the right" in (directory / "README.md").read_text().replace(
        "\n", " ")


def test_an_added_padding_token_changes_no_id(tmp_path):
    """PPO reads the policy's ids with the exported reward model."""
    from transformers import AutoTokenizer

    model, tokenizer = classifier(tmp_path, "</s>")
    directory = exported(model, cloned(model), tokenizer, tmp_path / "model", card("reward_model"))
    words = AutoTokenizer.from_pretrained(directory)
    assert words(ROWS)["input_ids"] == tokenizer(ROWS)["input_ids"]
    assert tokenizer_digest(words) == tokenizer_digest(tokenizer)
    again = exported(*reloaded(directory), tmp_path / "again", card("reward_model"))
    assert AutoTokenizer.from_pretrained(again).get_vocab() == words.get_vocab(), "it is added once"


def reloaded(directory):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(directory)
    return model, cloned(model), AutoTokenizer.from_pretrained(directory)


def test_the_padding_of_a_language_model_stays(tmp_path):
    from transformers import AutoTokenizer

    model, tokenizer = tiny(tmp_path)
    tokenizer.pad_token, tokenizer.padding_side, tokenizer.init_kwargs["padding_side"] = "</s>", "left", "left"
    words = AutoTokenizer.from_pretrained(exported(model, cloned(model), tokenizer, tmp_path / "model", card()))
    assert (words.pad_token, words.padding_side, len(words)) == ("</s>", "left", 64)


def test_an_export_generates_and_tokenises_like_the_original(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = tiny(tmp_path)
    own = model.generation_config
    directory = exported(model, cloned(model), tokenizer, tmp_path / "model", card())
    assert model.generation_config is own, "it is only left out while transformers writes the model"
    loaded, words = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    inputs = words("w5 w9 w7", return_tensors="pt")
    assert inputs["input_ids"].tolist() == [[5, 9, 7]] and words.eos_token_id == 1 and words.pad_token_id == 0
    kwargs = {"input_ids": inputs["input_ids"], "max_new_tokens": 8, "do_sample": False}
    out = loaded.generate(**kwargs)
    assert out.shape[1] > 3 and torch.equal(out, model.generate(**kwargs))
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 1


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_stored_once(tmp_path, tied):
    model, tokenizer = tiny(tmp_path, tied)
    directory = exported(model, cloned(model), tokenizer, tmp_path / "model", card())
    assert ("lm_head.weight" in stored(directory)) == (not tied)
    assert "model.embed_tokens.weight" in stored(directory)


def test_weights_come_from_the_state_dict_and_the_skeleton_may_be_empty(tmp_path):
    from transformers import AutoModelForCausalLM

    model, tokenizer = tiny(tmp_path)
    weights = {name: weight + 1 for name, weight in cloned(model).items()}
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(model.config)
    directory = exported(skeleton, weights, tokenizer, tmp_path / "model", card())
    loaded = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_the_configuration_names_the_dtype_of_the_weights(tmp_path):
    from transformers import AutoModelForCausalLM

    model, tokenizer = tiny(tmp_path)
    weights = {name: weight.bfloat16() for name, weight in cloned(model).items()}
    directory = exported(model, weights, tokenizer, tmp_path / "model", card())
    assert AutoModelForCausalLM.from_pretrained(directory).dtype == torch.bfloat16
    assert json.loads((directory / "config.json").read_text())["dtype"] == "bfloat16"


def test_large_weights_are_sharded_and_load(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(export, "MAX_SHARD_SIZE", "20KB")
    model, tokenizer = tiny(tmp_path)
    directory = exported(model, cloned(model), tokenizer, tmp_path / "model", card())
    assert len(list(directory.glob("model-*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in model.state_dict().items())


def test_a_new_export_replaces_the_older_one_whole(tmp_path):
    model, tokenizer = tiny(tmp_path)
    directory = exported(model, cloned(model), tokenizer, tmp_path / "out" / "model", card())
    (directory / "model-00001-of-00002.safetensors").write_bytes(b"of an older, sharded export")
    export_model(model, cloned(model), tokenizer, directory, card())
    assert not list(directory.glob("model-*"))
    assert [path.name for path in directory.parent.iterdir()] == ["model"]


def test_a_failed_export_leaves_the_older_one_and_no_leftover(tmp_path, monkeypatch):
    model, tokenizer = tiny(tmp_path)
    directory = exported(model, cloned(model), tokenizer, tmp_path / "out" / "model", card())
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    monkeypatch.setattr(type(tokenizer), "save_pretrained", lambda *_: (_ for _ in ()).throw(OSError("unplugged")))
    with pytest.raises(OSError, match="unplugged"):
        export_model(model, {k: v + 1 for k, v in cloned(model).items()}, tokenizer, directory, card())
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    assert [path.name for path in directory.parent.iterdir()] == ["model"]


def test_a_directory_with_something_else_is_not_replaced(tmp_path):
    model, tokenizer = tiny(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    with pytest.raises(CheckpointError, match="is not an exported model"):
        export_model(model, cloned(model), tokenizer, tmp_path / "mine", card())
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(CheckpointError, match="not a plain directory"):
        export_model(model, cloned(model), tokenizer, tmp_path / "link", card())
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "precious"


def test_wrong_weights_are_named(tmp_path):
    model, tokenizer = tiny(tmp_path)
    norm = "model.norm.weight"

    def export(change):
        weights = cloned(model)
        change(weights)
        export_model(model, weights, tokenizer, tmp_path / "model", card())

    with pytest.raises(CheckpointError, match=rf"those of LlamaForCausalLM: missing \['{norm}'\]"):
        export(lambda w: w.pop(norm))
    with pytest.raises(CheckpointError, match=r"unknown \['value_head'\]"):
        export(lambda w: w.update(value_head=torch.zeros(1)))
    with pytest.raises(CheckpointError, match=rf"{norm} has shape \(3,\), the model's is \(32,\)"):
        export(lambda w: w.update({norm: torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight and model\.embed_tokens\.weight are tied"):
        export(lambda w: w["lm_head.weight"].add_(1))
    assert not (tmp_path / "model").exists()


def test_the_model_card_says_where_the_model_comes_from(tmp_path):
    from huggingface_hub import ModelCard

    model, tokenizer = tiny(tmp_path)
    info = card(rewards="main (model models/judge)")
    directory = exported(model, cloned(model), tokenizer, tmp_path / "model", info)
    text = (directory / "README.md").read_text()
    for part in ("12 updates", f"on {datetime.now(UTC).date()}", "`models/start`",
                 "Rewarded for: main (model models/judge)", "reviews.jsonl", "| reward | 1.25 |"):
        assert part in text
    data = ModelCard.load(directory / "README.md").data
    assert data.library_name == "transformers" and data.pipeline_tag == "text-generation" and "ppo" in data.tags


def test_the_model_card_links_a_hub_base_model_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "start").mkdir(parents=True)
    assert model_card(card(), "model").data.base_model is None
    hub = ModelCardInfo("reward_model", 1, "owner/name", "pairs")
    assert model_card(hub, "model").data.base_model == "owner/name"
    for path in ("./model", "../model", "models/.hidden", "/model", "models/", "a/b/c", "model"):
        assert model_card(ModelCardInfo("sft", 1, path, "rows"), "model").data.base_model is None, path
    assert "AutoModelForSequenceClassification" in model_card(hub, "model").text


def test_the_model_card_says_which_weights_these_are_where_they_are_others():
    assert "- Weights: an average" in model_card(card(weights="an average"), "model").text
    assert "Weights:" not in model_card(card(), "model").text


def test_the_code_in_the_model_card_runs(trained, tmp_path):
    """The card's own lines load the export and give a number or a text."""
    model, tokenizer, auto = trained
    stage = "reward_model" if "Sequence" in auto.__name__ else "sft"
    directory = exported(model, cloned(model), tokenizer, tmp_path / "model", card(stage))
    text = (directory / "README.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    code = code.replace("path/to/this/directory", str(directory)).replace("a prompt and its response", "w5 w6")
    names: dict = {}
    exec(code.replace("a prompt", "w5 w6"), names)
    assert isinstance(names["score"].item(), float) if stage == "reward_model" else names["text"].startswith("w5 w6")


@pytest.mark.parametrize(("stage", "words", "head"), [
    ("sft", "supervised fine-tuning on demonstrations", "AutoModelForCausalLM"),
    ("reward_model", "", "AutoModelForSequenceClassification"),
    ("process_reward", "", "AutoModelForCausalLM"),
    ("ppo", "", "AutoModelForCausalLM"),
])
def test_cards_of_models_and_adapters_say_the_stage_and_how_to_load_them(stage, words, head):
    info = ModelCardInfo(stage, 1, "owner/name", "rows")
    adapters = model_card(info, "model", adapters=True)
    for made in (model_card(info, "model"), adapters):
        assert head in made.text and words in made.text
        assert {"rlhf", "rlhf-ray", stage.replace("_", "-")} <= set(made.data.tags)
        assert made.data.base_model == "owner/name"
    assert ("num_labels=1)" in adapters.text) is (stage == "reward_model")
    assert "lora" in adapters.data.tags and adapters.data.library_name == "peft"
    assert info.weights is None and info.rewards is None
    for text in (made.text for made in (model_card(info, "model"), adapters)):
        assert ("The score is that of a row's last token" in text) is (stage == "reward_model")
    assert ("pad_token_id = None" in adapters.text) is (stage == "reward_model")


def test_the_card_of_a_model_that_answers_conversations_asks_it_in_one(tmp_path):
    """Its code is run, and generates an answer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = make_tiny_llama(tmp_path / "source", vocab=64, hidden=32)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    assert "apply_chat_template" not in str(model_card(card(), "m"))
    directory = exported(model, cloned(model), tokenizer, tmp_path / "model", card(chat=True))
    code = (directory / "README.md").read_text().split("```python\n")[1].split("```")[0]
    found = {}
    exec(code.replace("path/to/this/directory", str(directory)), found)
    assert isinstance(found["text"], str) and len(found["tokens"]) > 0


def test_the_card_of_a_model_for_the_hub_loads_it_from_there():
    there = card(stage="sft", repository="me/mine")
    assert 'from_pretrained("me/mine")' in model_card(there, "step_4").text
    assert "\n# me/mine\n" in model_card(there, "step_4").text
    adapters = model_card(replace(there, subfolder="adapter"), "adapter", adapters=True).text
    assert 'PeftModel.from_pretrained(base, "me/mine", subfolder="adapter")' in adapters
    assert 'from_pretrained("path/to/this/directory")' in model_card(card(stage="sft", subfolder="x"), "x").text
