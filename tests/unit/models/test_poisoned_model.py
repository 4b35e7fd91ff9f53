"""A model directory that somebody prepared: whatever it holds, reading it runs nothing of it and asks nobody."""

import json
import shutil
from typing import Any

import pytest
import torch

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.chat import ChatTemplate
from rlhf_ray.errors import ModelError
from rlhf_ray.models.classifier import Classifier
from rlhf_ray.models.config_json import pretrained_config
from rlhf_ray.models.loading import (
    check_scalar_head,
    load_causal_lm,
    load_scalar_model,
    load_tokenizer,
)
from rlhf_ray.models.lora_targets import check_targets
from rlhf_ray.models.model_families import Use, check_family
from tests.models import make_tiny_llama, make_tiny_reward_model
from tests.sentinel import Sentinel

MODULE = """
open({sentinel!r}, "w").close()
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

class Config(LlamaConfig):
    model_type = "poisoned"

class Model(LlamaForCausalLM):
    config_class = Config

class Scorer(LlamaForSequenceClassification):
    config_class = Config

class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {"policy": make_tiny_llama(root / "policy", vocab=40, hidden=32, heads=1),
            "reward": make_tiny_reward_model(root / "reward", vocab=40)}


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch):
    """transformers asks at the terminal whether to run a model's code, unless it is told."""
    def ask(words: str = "") -> str:
        raise AssertionError(f"somebody was asked: {words}")

    monkeypatch.setattr("builtins.input", ask)


@pytest.fixture
def sentinel(tmp_path):
    """A file that is made when poison runs."""
    return tmp_path / "fired"


@pytest.fixture
def poisoned(models, tmp_path, sentinel):
    """poisoned("policy" or "reward", known) -> a copy with code for everything; `known`: of a type that needs none."""

    def make(kind: str, known: bool = False):
        directory = shutil.copytree(models[kind], tmp_path / f"poisoned_{kind}")
        (directory / "poison.py").write_text(MODULE.format(sentinel=str(sentinel)))
        torch.save(Sentinel(sentinel), directory / "pytorch_model.bin")
        torch.save(Sentinel(sentinel), directory / "training_args.bin")
        names = {"AutoConfig": "poison.Config", "AutoModelForCausalLM": "poison.Model",
                 "AutoModelForSequenceClassification": "poison.Scorer"}
        change(directory / "config.json", auto_map=names, **({} if known else {"model_type": "poisoned"}))
        change(directory / "tokenizer_config.json", tokenizer_class="Tokenizer",
               auto_map={"AutoTokenizer": [None, "poison.Tokenizer"]})
        return directory

    return make


def change(file, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def config(path) -> ModelConfig:
    return ModelConfig(path=str(path))


READERS = {
    "load_causal_lm": ("policy", lambda c: load_causal_lm(c)),
    "load_scalar_model": ("reward", lambda c: load_scalar_model(c, new_head=False)),
    "Classifier": ("reward", Classifier),
    "check_scalar_head": ("reward", check_scalar_head),
    "check_family": ("reward", lambda c: check_family(c, "rewards.main", {Use.SCALAR})),
    "check_targets": ("policy", lambda c: check_targets(["q_proj"], c, "policy.lora.targets", scalar=False)),
    "pretrained_config": ("policy", pretrained_config),
    "load_tokenizer": ("policy", load_tokenizer),
}


@pytest.mark.parametrize("reader", READERS)
def test_code_beside_a_model_of_an_unknown_kind_is_not_run_and_the_model_refused(poisoned, sentinel, reader):
    kind, read = READERS[reader]
    directory = poisoned(kind)
    with pytest.raises(ModelError, match="poisoned"):
        read(config(directory))
    assert not sentinel.exists()


@pytest.mark.parametrize("reader", [name for name in READERS if name != "load_tokenizer"])
def test_code_beside_a_model_of_a_known_kind_is_not_run_and_the_model_read_without(poisoned, sentinel, reader):
    kind, read = READERS[reader]
    read(config(poisoned(kind, known=True)))
    assert not sentinel.exists()


def test_the_code_would_run_if_it_were_trusted(poisoned, sentinel):
    """Else the tests above would prove nothing."""
    trusted = ModelConfig(path=str(poisoned("policy")), trust_remote_code=True, revision="0" * 40)
    assert type(load_causal_lm(trusted)).__name__ == "Model" and sentinel.exists()
    sentinel.unlink()
    assert type(load_tokenizer(trusted)).__name__.startswith("Tokenizer")


def test_trust_does_not_reach_a_tokenizer_from_elsewhere(poisoned, models, sentinel):
    elsewhere = ModelConfig(path=str(models["policy"]), tokenizer=str(poisoned("policy", known=True)),
                            trust_remote_code=True, revision="0" * 40)
    with pytest.raises(ModelError, match="custom code"):
        load_tokenizer(elsewhere)
    assert not sentinel.exists()


def test_an_index_that_leads_to_pickled_weights_is_not_followed(models, tmp_path, sentinel):
    """model.safetensors.index.json says in which file each tensor is."""
    directory = shutil.copytree(models["policy"], tmp_path / "copy")
    (directory / "model.safetensors").rename(directory / "other.safetensors")
    torch.save({"lm_head.weight": Sentinel(sentinel)}, directory / "pytorch_model.bin")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model.bin"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"no model could be loaded from '.*copy'"):
        load_causal_lm(config(directory))
    assert not sentinel.exists()


def test_pickled_adapters_beside_a_model_are_not_read(models, tmp_path, sentinel):
    """transformers attaches adapters that lie in a model's directory."""
    directory = shutil.copytree(models["policy"], tmp_path / "copy")
    (directory / "adapter_config.json").write_text(json.dumps(
        {"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"], "base_model_name_or_path": str(directory)}))
    torch.save({"poison": Sentinel(sentinel)}, directory / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"no model could be loaded from '.*copy'"):
        load_causal_lm(config(directory))
    assert not sentinel.exists()


@pytest.mark.parametrize("template", [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append.__self__.__class__.__base__.__subclasses__()[0] }}",
    "{{ cycler.__init__.__globals__.os.system('touch SENTINEL') }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('SENTINEL', 'w') }}",
    "{{ (messages|attr('append')|attr('__self__')|attr('__class__')).mro() }}",
    "{% set _ = messages.append({'role': 'user', 'content': 'put in by the template'}) %}x",
])
def test_a_chat_template_stays_in_its_sandbox(models, sentinel, template):
    tokenizer = load_tokenizer(config(models["policy"]))
    tokenizer.chat_template = template.replace("SENTINEL", str(sentinel))
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(ModelError, match=r"row 1: the tokenizer's chat template refuses the messages"):
        ChatTemplate(tokenizer).render(messages, "row 1", ask=True)
    assert not sentinel.exists() and len(messages) == 1
