"""What vLLM is asked for: a cache, a prefill budget, and memory that must be free when an engine starts."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest

from rlhf_ray.config.generation import EngineArgument, GenerationConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.internals.vllm import BACKENDS
from rlhf_ray.planning.hardware import H100
from rlhf_ray.planning.inference_memory import generator_memory
from rlhf_ray.planning.memory_breakdown import ACTIVATIONS, CACHE, LOGITS, MIB
from rlhf_ray.planning.model_shape import ModelShape
from rlhf_ray.roles.engines.interface import EngineSettings
from rlhf_ray.roles.engines.vllm_adapter import (
    engine_arguments,
    generator_environment,
    inspect_architectures,
    path_for_vllm,
)
from tests.models import make_tiny_llama

CONTEXT, GIB = 256, 2**30
SHAPE = ModelShape(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=96, vocabulary=320)


def settings(path="m", **generation):
    return EngineSettings(ModelConfig(path=str(path)), GenerationConfig(**generation), CONTEXT, 0, "generator/0",
                          ["LlamaForCausalLM"], {}, str)


def arguments(path="m", **generation):
    return engine_arguments(settings(path, **generation))


def require_free_memory(asked, free_gib, total_gib=80):
    """vLLM's own check of a GPU before an engine starts there."""
    from vllm.v1.worker.utils import request_memory

    snapshot = SimpleNamespace(total_memory=total_gib * GIB, free_memory=free_gib * GIB, device_="cuda:0")
    return request_memory(snapshot, SimpleNamespace(gpu_memory_utilization=asked.gpu_memory_utilization))


def test_a_worker_s_gpus_are_divided_as_asked():
    asked = arguments(gpus=6, tensor_parallel=2, pipeline_parallel=3)
    assert (asked.tensor_parallel_size, asked.pipeline_parallel_size) == (2, 3)


class TestCache:
    def test_a_generator_with_a_cache_of_its_own_size_starts_again_beside_a_learner(self):
        """The learner is alive and has two thirds of the GPU when a lost generator comes back."""
        asked = arguments(gpus=0.5, kv_cache_mb=4096)
        assert asked.kv_cache_memory_bytes == 4096 * MIB
        require_free_memory(asked, free_gib=26)

    def test_one_that_takes_what_there_is_still_asks_for_its_share(self):
        asked = arguments(gpus=0.5, gpu_memory_utilization=0.4)
        assert (asked.kv_cache_memory_bytes, asked.gpu_memory_utilization) == (None, 0.4)
        with pytest.raises(ValueError, match=r"Free memory .* is less than desired"):
            require_free_memory(asked, free_gib=26)

    @pytest.mark.parametrize(("gpus", "bytes_"), [(0, 64 * MIB), (1, None)])
    def test_by_default_a_gpu_s_is_what_is_left_and_a_cpu_s_is_small(self, gpus, bytes_):
        assert arguments(gpus=gpus).kv_cache_memory_bytes == bytes_

    def test_the_plan_counts_the_same(self):
        def planned(**generation):
            memory = generator_memory(GenerationConfig(**generation), SHAPE, CONTEXT, H100, 0.0)
            return memory.shown[CACHE]

        assert planned() == 64 * MIB
        assert planned(gpus=1, kv_cache_mb=4096) == 4096 * MIB
        assert planned(gpus=1) > 60 * GIB


class TestFurtherArguments:
    def test_they_are_passed_on_by_name_and_take_the_place_of_our_own(self):
        asked = arguments(gpus=1, vllm={"block_size": 32, "enforce_eager": True, "kv_cache_dtype": "fp8"})
        assert (asked.block_size, asked.enforce_eager, asked.kv_cache_dtype) == (32, True, "fp8")
        assert arguments(gpus=1).enforce_eager is False

    def test_how_vllm_compiles_may_be_set_and_operators_that_compute_wrongly_stay_out(self):
        given = {"compilation_config": {"mode": 0, "custom_ops": ["all"]}}
        assert arguments(gpus=1, vllm=given).compilation_config.mode == 0
        latent = engine_arguments(replace(settings(vllm=given), architectures=["DeepseekV3ForCausalLM"]))
        assert (latent.compilation_config.mode, latent.compilation_config.custom_ops) == (0, ["-rotary_embedding"])

    def test_texts_of_a_command_line_become_what_they_say(self):
        texts = {"max_num_batched_tokens": "4096", "enforce_eager": "false", "kv_cache_dtype": "fp8"}
        given = GenerationConfig.model_validate({"vllm": texts})
        assert given.vllm == {"max_num_batched_tokens": 4096, "enforce_eager": False, "kv_cache_dtype": "fp8"}

    def test_vllm_has_all_of_them(self):
        from vllm.engine.arg_utils import AsyncEngineArgs

        assert set(get_args(EngineArgument)) <= AsyncEngineArgs.__dataclass_fields__.keys()

    def test_the_budget_of_a_pass_may_be_set_and_is_what_the_plan_counts(self):
        given = GenerationConfig(gpus=1, vllm={"max_num_batched_tokens": 16384})
        assert arguments(gpus=1, vllm=given.vllm).max_num_batched_tokens == given.prefill_tokens(CONTEXT) == 16384

    @pytest.mark.parametrize(("changes", "message"), [
        ({"vllm": {"quantization": "fp8"}}, "vllm.quantization"),
        ({"vllm": {"max_num_batched_tokens": 8}}, "max_num_batched_tokens=8 .* max_sequences=64"),
        ({"vllm": {"max_num_batched_tokens": "many"}}, "max_num_batched_tokens=many"),
        ({"vllm": {"block_size": "[16"}}, "has a value that cannot be read"),
        ({"vllm": {"enable_chunked_prefill": True}}, "enable_chunked_prefill=True divides"),
        ({"vllm": {"enable_chunked_prefill": None}}, "enable_chunked_prefill is empty"),
        ({"vllm": {"async_scheduling": None}, "gpus": 1, "engine": "in_process"}, "async_scheduling is empty"),
        ({"vllm": {"max_num_batched_tokens": "null"}}, "max_num_batched_tokens is empty"),
        ({"vllm": {"long_prefill_token_threshold": 64}}, "long_prefill_token_threshold=64 divides"),
        ({"vllm": {"async_scheduling": True}}, "engine=async"),
        ({"vllm": {"async_scheduling": True}, "gpus": 1, "engine": "in_process"}, "engine=async"),
    ])
    def test_what_would_sample_wrongly_is_refused(self, changes, message):
        with pytest.raises(ConfigError, match=message):
            GenerationConfig(**changes)


class TestPrefill:
    @pytest.mark.parametrize("engine", ["async", "in_process"])
    @pytest.mark.parametrize(("gpus", "tokens"), [(0, 2048), (1, 8192)])
    def test_both_engines_get_the_same_budget_and_it_is_said(self, engine, gpus, tokens):
        assert arguments(engine=engine, gpus=gpus).max_num_batched_tokens == tokens

    def test_it_has_room_for_one_token_of_every_sequence_and_for_no_more_than_all_of_them(self):
        assert arguments(gpus=1, max_sequences=10_000).max_num_batched_tokens == 10_000
        assert arguments(gpus=1, max_sequences=4).max_num_batched_tokens == 4 * CONTEXT

    @pytest.mark.parametrize("engine", ["async", "in_process"])
    def test_on_cpus_a_pass_holds_a_whole_sequence_and_none_is_divided(self, engine):
        asked = engine_arguments(replace(settings(engine=engine), max_context=5000))
        assert asked.max_num_batched_tokens == 5000 and asked.enable_chunked_prefill is False
        assert arguments(gpus=1).enable_chunked_prefill is None  # vLLM's default

    def test_it_is_what_vllm_s_scheduler_works_with(self, tmp_path):
        from vllm.usage.usage_lib import UsageContext

        inspect_architectures(settings())  # else vLLM starts a process for it
        model = make_tiny_llama(tmp_path / "m", positions=CONTEXT)
        asked = arguments(model, gpus=1)
        asked.distributed_executor_backend = "uni"
        config = asked.create_engine_config(UsageContext.ENGINE_CONTEXT)  # as AsyncLLM.from_engine_args makes it
        assert config.scheduler_config.max_num_batched_tokens == 8192

    def test_the_plan_counts_a_pass_on_cpus_too(self):
        """A prefill's activations, and logits of all sequences twice."""
        def counted(**more):
            return generator_memory(GenerationConfig(**more), SHAPE, CONTEXT, H100, 0.0).host

        few, many = counted(max_sequences=2), counted(max_sequences=64)
        assert many[LOGITS] == 2 * 64 * SHAPE.vocabulary * 4 and few[LOGITS] == many[LOGITS] / 32
        assert many[ACTIVATIONS] * 2 * CONTEXT == few[ACTIVATIONS] * 2048 > 0

    def test_the_plan_counts_the_weight_of_a_head_that_cpus_convert_to_float32(self):
        def logits(**more):
            half = SHAPE.in_bytes(2)
            whole, head = (generator_memory(GenerationConfig(**more), half, CONTEXT, H100, 0.0, float32_head=asked)
                           for asked in (False, True))
            return head.shown[LOGITS] - whole.shown[LOGITS]

        assert logits() == SHAPE.vocabulary * SHAPE.hidden * 4 and logits(gpus=1) == 0

    def test_the_plan_counts_the_same(self):
        def activations(**more):
            return generator_memory(GenerationConfig(gpus=1, **more), SHAPE, CONTEXT, H100, 0.0).device[ACTIVATIONS]

        assert activations(max_sequences=8) * 8192 == activations() * 8 * CONTEXT


@pytest.mark.parametrize("architectures", [["SeedOssForCausalLM"], ["NobodysForCausalLM"], []])
def test_a_model_that_vllm_runs_through_transformers_needs_no_process_to_inspect_it(architectures):
    from vllm import ModelRegistry

    inspect_architectures(replace(settings(), architectures=architectures))
    for name in [n for n in architectures if n in ModelRegistry.models] or BACKENDS:
        assert not hasattr(ModelRegistry.models[name], "module_name"), "vLLM has the class, not its name"


def test_latent_attention_on_cpus_does_without_vllm_s_kernel_of_rotary_embeddings():
    def operators(architecture, **generation):
        given = replace(settings(**generation), architectures=[architecture])
        return engine_arguments(given).compilation_config.custom_ops

    assert operators("DeepseekV3ForCausalLM") == ["-rotary_embedding"]
    assert not operators("DeepseekV3ForCausalLM", gpus=1) and not operators("LlamaForCausalLM")


@pytest.mark.parametrize("name", ["[a]", "a*", "plain"])
def test_vllm_finds_the_weights_of_a_directory_with_any_name(tmp_path, name):
    """By its own look for them."""
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    path = make_tiny_llama(tmp_path / name / "model")
    asked = path_for_vllm(str(path))
    loader = DefaultModelLoader(LoadConfig(load_format="safetensors"))
    _, files, *_ = loader._prepare_weights(asked, None, None, False, None)
    assert [Path(file).resolve() for file in files] == [path / "model.safetensors"]
    assert arguments(path).model == asked and (asked == str(path)) == (name == "plain")


def test_a_name_on_the_hub_is_left_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert path_for_vllm("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"


@pytest.mark.parametrize(("gpus", "installed", "said"), [(1, False, "0"), (1, True, None), (0, False, None)])
def test_vllm_s_sampler_does_without_flashinfer_where_that_is_not_installed(gpus, installed, said, monkeypatch):
    monkeypatch.setattr("rlhf_ray.roles.engines.vllm_adapter.find_spec", lambda name: object() if installed else None)
    assert generator_environment(GenerationConfig(gpus=gpus)).get("VLLM_USE_FLASHINFER_SAMPLER") == said
