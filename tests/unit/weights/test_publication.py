"""Which ranks take part when a model is gathered, published or written."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_ray.checkpoint.model_card import ModelCardInfo
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import NoWeightsPlan
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.weights import gathered_tensors
from rlhf_ray.weights.gathered_tensors import GatheredAdapters, GatheredModel
from rlhf_ray.weights.publication import Publication
from tests.models import make_tiny_tokenizer
from tests.tiny_families import DECODERS, config_of, randomised

CARD = SimpleNamespace()


@pytest.fixture
def model_of(monkeypatch):
    """model_of(rank, lockstep) -> (its GatheredModel, what it gathers, what it writes)."""

    def make(rank, lockstep):
        gathered, written = [], []
        engine = SimpleNamespace(device="cpu", parameter_shapes=list, gather=lambda names, wanted: (
            gathered.append((names, wanted)) or dict.fromkeys(names, torch.tensor(0))))
        adapters = SimpleNamespace(trained_names=lambda _: ["a"], peft_config="config", peft_state=lambda t: t,
                                   sources=lambda names: [f"{name}.base" for name in names],
                                   merged=lambda names, tensors: ("merged", names, tensors))
        monkeypatch.setattr(gathered_tensors, "export_adapter", lambda *arguments: written.append(arguments))
        return GatheredModel(engine, adapters, ModelConfig(path="m"), rank, lockstep), gathered, written

    return make


@pytest.mark.parametrize(("rank", "lockstep", "gathers", "writes"), [
    (0, False, True, True), (0, True, True, True), (1, False, False, False), (1, True, True, False)])
def test_rank_0_writes_the_adapters_and_all_ranks_gather_sharded_ones(
        model_of, tmp_path, rank, lockstep, gathers, writes):
    model, gathered, written = model_of(rank, lockstep)
    model.export_adapter(str(tmp_path), CARD)
    assert gathered == [(["a"], not rank)] * gathers
    assert written == [("config", {"a": torch.tensor(0)}, tmp_path, CARD, None)] * writes


@pytest.mark.parametrize(("rank", "lockstep", "gathers"), [
    (0, False, True), (0, True, True), (1, False, False), (1, True, True)])
def test_rank_0_returns_the_weights_and_all_ranks_gather_sharded_ones(model_of, rank, lockstep, gathers):
    model, gathered, _ = model_of(rank, lockstep)
    weights = model.gather(["w"])
    assert gathered == [(["w.base"], not rank)] * gathers
    assert weights == (None if rank else ("merged", ["w"], {"w.base": torch.tensor(0)}))


def test_another_source_is_asked_on_every_rank(model_of):
    model, gathered, _ = model_of(1, False)
    asked = []
    assert model.gather(["w"], lambda names, wanted: asked.append((names, wanted)) or {}) is None
    assert asked == [(["w.base"], False)] and not gathered


@pytest.mark.parametrize(("rank", "lockstep", "gathers"), [
    (0, False, True), (0, True, True), (1, False, False), (1, True, True)])
def test_rank_0_returns_the_adapters_and_all_ranks_gather_sharded_ones(rank, lockstep, gathers):
    gathered = []
    engine = SimpleNamespace(device="cpu", gather=lambda names, wanted: (
        gathered.append((names, wanted)) or dict.fromkeys(names, 0)))
    adapters = SimpleNamespace(published_sources=lambda names: [f"{name}.default" for name in names],
                               published=lambda names, tensors: ("scaled", names, tensors))
    tensors = GatheredAdapters(engine, adapters, "bfloat16", rank, lockstep).gather(["a"])
    assert gathered == [(["a.default"], not rank)] * gathers
    assert tensors == (None if rank else ("scaled", ["a"], {"a.default": 0}))


def test_only_rank_0_needs_a_plan_to_say_what_training_does_not_change():
    assert Publication(1, lockstep=False).unchanged() is None
    with pytest.raises(NoWeightsPlan, match="plan_weights"):
        Publication(0, lockstep=False).unchanged()


def test_buffers_that_are_saved_are_exported(tmp_path, monkeypatch):
    """DeepSeek's routers have a bias that training does not change."""
    shape = config_of("deepseek_v3", **DECODERS["deepseek_v3"])
    model = randomised(AutoModelForCausalLM.from_config(shape))
    [(name, bias)] = [(n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    bias.normal_()
    weights = dict(model.named_parameters())
    engine = SimpleNamespace(
        device="cpu", module=SimpleNamespace(model=model), gather=lambda names, _: {n: weights[n] for n in names},
        parameter_shapes=lambda: [(n, tuple(w.shape)) for n, w in weights.items()])
    make_tiny_tokenizer(tmp_path / "tokenizer", 64)
    tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path / "tokenizer")))
    monkeypatch.setattr(gathered_tensors, "load_tokenizer", lambda _: tokenizer)
    card = ModelCardInfo(stage="sft", step=1, base_model="m", trained_on="d")
    with torch.no_grad():
        GatheredModel(engine, None, ModelConfig(path="m"), 0, False).export(str(tmp_path / "model"), card)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(dict(again.named_buffers())[name], bias)
    assert all(torch.equal(w, weights[n]) for n, w in again.named_parameters())
