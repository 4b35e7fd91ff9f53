"""Which ranks take part when a model is gathered, published or written."""

from types import SimpleNamespace

import pytest
import torch

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import NoWeightsPlan
from rlhf_ray.roles import publication
from rlhf_ray.roles.publication import Publication, PublishedAdapters, PublishedModel

CARD = SimpleNamespace()


@pytest.fixture
def model_of(monkeypatch):
    """model_of(rank, lockstep) -> (its PublishedModel, what it gathers, what it writes)."""

    def make(rank, lockstep):
        gathered, written = [], []
        engine = SimpleNamespace(device="cpu", parameter_shapes=list, gather=lambda names, wanted: (
            gathered.append((names, wanted)) or dict.fromkeys(names, torch.tensor(0))))
        adapters = SimpleNamespace(trained_names=lambda _: ["a"], peft_config="config", peft_state=lambda t: t,
                                   sources=lambda names: [f"{name}.base" for name in names],
                                   merged=lambda names, tensors: ("merged", names, tensors))
        monkeypatch.setattr(publication, "export_adapter", lambda *arguments: written.append(arguments))
        return PublishedModel(engine, adapters, ModelConfig(path="m"), rank, lockstep), gathered, written

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
    tensors = PublishedAdapters(engine, adapters, "bfloat16", rank, lockstep).gather(["a"])
    assert gathered == [(["a.default"], not rank)] * gathers
    assert tensors == (None if rank else ("scaled", ["a"], {"a.default": 0}))


def test_only_rank_0_needs_a_plan_to_say_what_training_does_not_change():
    assert Publication(1, lockstep=False).unchanged() is None
    with pytest.raises(NoWeightsPlan, match="plan_weights"):
        Publication(0, lockstep=False).unchanged()
