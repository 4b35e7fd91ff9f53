"""One rank of DeepSpeed: an update by hand, in parts, resumed, and refused when a number is not finite."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.engine import deepspeed_engine
from rlhf_ray.engine.deepspeed_engine import recompute_layers
from rlhf_ray.errors import ModelError
from rlhf_ray.internals.transformers import is_checkpointed
from tests.tiny_families import DECODERS, config_of


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the process of `one_rank` saw."""
    target = tmp_path_factory.mktemp("engine") / "told.json"
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("one_rank.py")), str(target)],
                          env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(target.read_text())


def test_the_first_update_by_hand(told):
    # Loss 3 w1 - 4 w2: gradient (3, -4) of norm 5, clipped to norm 1. Adam's first step is the rate times its sign.
    assert told["results"][0] == pytest.approx(
        {"applied": True, "grad_norm": 5.0, "learning_rate": 0.05}, rel=1e-5)
    assert told["first"] == pytest.approx([0.95, 2.05], abs=1e-6)


def test_unsharded_ranks_make_the_same_update_and_tell_the_same_norm(told):
    assert told["unsharded"]["result"] == pytest.approx(told["results"][0], rel=1e-5)
    assert told["unsharded"]["first"] == pytest.approx(told["first"], abs=1e-6)


def test_the_rate_follows_the_schedule(told):
    assert [result["learning_rate"] for result in told["results"]] == pytest.approx([0.05, 0.1, 0.1])


def test_a_loss_in_parts_makes_the_same_update(told):
    assert told["in_parts"] == pytest.approx(told["first"], abs=1e-7)


def test_a_saved_engine_goes_on_as_if_it_had_never_stopped(told):
    assert told["restored"] == {"weights": told["first"], "steps": 1}
    assert told["second"][0] == told["second"][1] != told["first"]


def test_an_empty_directory_is_no_state(told):
    assert told["missing"].startswith("CheckpointError: ") and "nowhere holds no learner state" in told["missing"]


def test_a_checkpoint_with_a_call_in_it_is_refused_and_the_call_never_made(told):
    assert told["poisoned"].startswith("CheckpointError: ")
    assert "rank_0.safetensors is not a learner's" in told["poisoned"]


def test_layers_are_told_when_they_are_trained_whatever_they_were_told_before(told):
    assert told["modes"] == [True, False, False, True, True]


def test_state_that_is_put_aside_between_updates_changes_nothing(told):
    for aside, kept in told["put_aside"]:
        assert aside == kept
        assert aside[0][2] == aside[2], "what was saved while it was put aside is whole"


def test_another_stage_goes_on_as_if_it_had_been_the_first(told):
    for first, second in told["at_another_stage"]:
        assert first == second


def test_inference_builds_no_graph(told):
    assert told["graph"] is False


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", ["loss", "infinite loss without a gradient", "gradient"])
def test_a_step_with_a_number_that_is_not_finite_is_as_if_it_had_never_been_tried(told, kind, stage):
    failed = told["spoiled"][kind][stage]
    assert not failed["applied"] and failed["norm"] in ("nan", "inf")
    assert failed["before"] == failed["left"]
    assert failed["disturbed"] == failed["plain"] and failed["plain"]["steps"] == 2


@pytest.mark.parametrize("stage", range(4))
def test_a_step_that_is_left_out_is_as_if_its_gradients_had_never_been_computed(told, stage):
    dropped, plain = told["dropped"][stage]
    assert dropped == plain and plain["steps"] == 2


def test_several_updates_in_a_row_that_apply_nothing_are_too_many(told):
    assert told["skipped_updates"]["counts"] == [1, 2, 0, 1, 2, 3]
    error = told["skipped_updates"]["error"]
    assert error.startswith("TrainingError: ")
    assert "3 consecutive updates (optimizer.max_consecutive_skipped_updates)" in error


def recomputed(model):
    return [i for i, layer in enumerate(model.get_decoder().layers) if is_checkpointed(layer)]


@pytest.mark.parametrize(("share", "layers"), [
    (0.05, []), (0.1, [7]), (0.25, [3, 7]), (0.5, [1, 3, 5, 7]), (0.6, [1, 3, 4, 6, 7]), (0.75, [1, 2, 3, 5, 6, 7]),
    (0.95, list(range(8))), (1.0, list(range(8))), (True, list(range(8)))])
def test_layers_to_recompute_are_spread_evenly(share, layers):
    model = LlamaForCausalLM(LlamaConfig(hidden_size=4, intermediate_size=4, num_hidden_layers=8, vocab_size=4,
                                         num_attention_heads=1))
    recompute_layers(model, share)
    assert recomputed(model) == layers


@pytest.mark.parametrize("family", DECODERS)
def test_every_family_recomputes_a_share_of_its_layers(family):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(family, **DECODERS[family]))
    count = model.config.get_text_config().num_hidden_layers
    recompute_layers(model, 0.5)
    assert sum(map(is_checkpointed, model.modules())) == count // 2


def test_a_share_is_refused_for_a_model_that_only_recomputes_all_layers(monkeypatch):
    model = LlamaForCausalLM(LlamaConfig(hidden_size=4, intermediate_size=4, num_hidden_layers=1, vocab_size=4,
                                         num_attention_heads=1))
    monkeypatch.setattr("rlhf_ray.internals.transformers.layers_of", lambda _: [])
    recompute_layers(model, True)
    with pytest.raises(ModelError, match=r"gradient_checkpointing=0.5 is a share .* LlamaForCausalLM .* to true"):
        recompute_layers(model, 0.5)


@pytest.mark.parametrize("most", [8, 11, 14, 15, 100])
def test_the_first_passes_of_compiled_layers_have_more_than_one_token_in_a_micro_batch(monkeypatch, most):
    """A graph of one token fits no other number."""
    engine, found = object.__new__(deepspeed_engine.TrainEngine), []
    engine.config = LearnerConfig(micro_batch_tokens=most)
    engine.device = "cpu"
    config = SimpleNamespace(max_position_embeddings=64, get_text_config=lambda: SimpleNamespace(vocab_size=9))
    engine.engine = SimpleNamespace(module=SimpleNamespace(model=SimpleNamespace(config=config)))
    for name in ("_set_mode", "_cast_cache"):
        monkeypatch.setattr(engine, name, lambda *_: nullcontext(), raising=False)
    monkeypatch.setattr(deepspeed_engine, "autocast", lambda _: nullcontext())
    monkeypatch.setattr(deepspeed_engine, "decoder_layers", lambda _: [])
    monkeypatch.setattr(deepspeed_engine, "hidden_states", lambda _, tokens, packing: found.append(packing.tokens))
    for fewer in (False, True):
        engine.try_layers(gradients=False, fewer=fewer)
    assert 1 < found[1] <= found[0] <= most
