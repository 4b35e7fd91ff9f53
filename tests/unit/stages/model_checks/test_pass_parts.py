"""Passes of learners and scorers with tiny models, right and damaged."""

import pytest
import torch

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import ModelError
from rlhf_ray.models.lora import Adapters
from rlhf_ray.models.packing import Packing
from rlhf_ray.stages.model_checks import generation_part, outcome, pass_parts
from rlhf_ray.stages.model_checks.pass_parts import check_adapters, check_passes, check_scalar_head
from tests.models import make_tiny_llama, make_tiny_reward_model

TOKENS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = make_tiny_llama(tmp_path_factory.mktemp("models") / "m", vocab=50, hidden=32, heads=1)
    return ModelConfig(path=str(path))


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    return ModelConfig(path=str(make_tiny_reward_model(tmp_path_factory.mktemp("models") / "r", vocab=50)))


@pytest.mark.parametrize(("check", "name"), [
    (check_passes, "log-probabilities"), (check_scalar_head, "scalar head"), (check_adapters, "LoRA")])
def test_a_model_that_works(check, name, model):
    (outcome,) = check(model, TOKENS)
    assert (outcome.name, outcome.verdict) == (name, "works")
    assert 0 < outcome.numbers["difference"] < 5e-5


def test_rows_are_as_long_as_asked(model, monkeypatch):
    longest = []
    original = Packing.of
    monkeypatch.setattr(Packing, "of", lambda lengths, device="cpu": (
        longest.append(max(lengths)), original(lengths, device))[1])
    check_passes(model, 200)
    assert max(longest) == 200


@pytest.mark.parametrize("check", [check_passes, check_adapters])
def test_passes_that_differ_from_transformers_are_an_error(check, model, monkeypatch):
    """Every position one later."""
    positions = Packing.positions.func
    monkeypatch.setattr(Packing, "positions", property(lambda self: positions(self) * 2))
    with pytest.raises(ModelError, match="differ by"):
        check(model, TOKENS)


def test_merged_weights_that_are_not_the_adapters_are_an_error(model, monkeypatch):
    merged = Adapters.merged

    def half(self, names, tensors):
        return {name: (tensors[self.sources([name])[0]] + whole) / 2
                for name, whole in merged(self, names, tensors).items()}

    monkeypatch.setattr(Adapters, "merged", half)
    with pytest.raises(ModelError, match="merged weights give log-probabilities that differ by"):
        check_adapters(model, TOKENS)


def test_a_reward_model_has_its_own_head_and_nothing_else(reward_model):
    assert check_passes(reward_model, TOKENS)[0].verdict == "does not apply"
    assert check_adapters(reward_model, TOKENS)[0].verdict == "does not apply"
    assert [o.verdict for o in generation_part.check_generation(reward_model, TOKENS)] == ["does not apply"] * 2
    (found,) = check_scalar_head(reward_model, TOKENS)
    assert found.verdict == "works" and found.detail.startswith("its own; scores differ by at most")


@pytest.mark.parametrize(("check", "use"), [(check_passes, "LANGUAGE"), (check_scalar_head, "SCALAR"),
                                            (check_adapters, "LANGUAGE")])
def test_a_family_that_is_known_not_to_work_is_refused_without_loading(check, use, model, monkeypatch):
    monkeypatch.setattr(outcome, "refusals", lambda _: {getattr(outcome.Use, use): "because"})
    monkeypatch.setattr(pass_parts, "load_causal_lm", None)
    monkeypatch.setattr(pass_parts, "load_scalar_model", None)
    (found,) = check(model, TOKENS)
    assert (found.verdict, found.detail) == ("refused", "because")


def test_bfloat16_has_its_own_tolerance(model):
    (found,) = check_adapters(model.model_copy(update={"dtype": "bfloat16"}), TOKENS)
    assert found.verdict == "works" and found.numbers["difference"] > 1e-4
    assert torch.get_default_dtype() is torch.float32
