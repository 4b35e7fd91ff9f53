"""The ends of responses in an exported generation_config.json, read by transformers."""

import pytest
import transformers

from rlhf_ray.checkpoint.export import export_model
from rlhf_ray.checkpoint.model_card import ModelCardInfo
from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.models.loading import load_causal_lm, load_tokenizer, new_causal_lm
from tests.layouts import make_layout

CARD = ModelCardInfo(stage="sft", step=1, base_model="scratch", trained_on="chats", metrics={})


@pytest.mark.parametrize(("name", "ends"), [
    ("base", ["<|endoftext|>", "<|im_end|>"]), ("chatml", "<|im_end|>"), ("blank_first", "</s>"),
])
def test_an_export_names_the_end_of_the_templates_answers(name, ends, tmp_path):
    config = NewModelConfig(architecture={"hidden_size": 32, "layers": 1, "heads": 1},
                            tokenizer=str(make_layout(tmp_path / "tokenizer", name)))
    model, tokenizer = new_causal_lm(config), load_tokenizer(config)
    before = model.generation_config.eos_token_id
    export_model(model, model.state_dict(), tokenizer, tmp_path / "model", CARD)
    exported = transformers.GenerationConfig.from_pretrained(tmp_path / "model")
    assert tokenizer.convert_ids_to_tokens(exported.eos_token_id) == ends
    assert model.generation_config.eos_token_id == before, "the model itself is unchanged"
    again = ModelConfig(path=str(tmp_path / "model"))
    export_model(load_causal_lm(again), load_causal_lm(again).state_dict(), load_tokenizer(again), tmp_path / "b", CARD)
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "b").eos_token_id == exported.eos_token_id
