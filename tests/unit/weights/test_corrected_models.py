"""Corrections of vLLM's models apply, and what they correct is still there."""

import inspect

from vllm.model_executor.models import bloom

from rlhf_ray.internals.vllm import model_class
from rlhf_ray.weights.corrected_models import Bloom
from rlhf_ray.weights.object_store_backend import register_corrected_models


def test_vllm_runs_the_correction_in_place_of_its_own_model():
    register_corrected_models()
    assert model_class("BloomForCausalLM") is Bloom


def test_vllm_takes_the_exact_gelu_for_bloom():
    """`tests/cluster/test_generator_families.py` compares the corrected model with transformers'."""
    assert 'self.gelu_impl = get_act_fn("gelu")' in inspect.getsource(bloom.BloomMLP), "is the correction needed still?"
