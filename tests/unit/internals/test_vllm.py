"""vLLM's internals are as `rlhf_ray.internals.vllm` describes them. Its own code runs here without an engine;
`tests/cluster/test_generator.py` runs engines."""

import inspect
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from vllm import SamplingParams
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.executor import Executor

from rlhf_ray.internals import vllm as internals

READ_AGAIN = "vLLM has changed: read rlhf_ray/internals/vllm.py against its sources"


def test_an_engine_is_made_of_a_configuration_and_an_executor(monkeypatch):
    made, takes = [], inspect.signature(LLMEngine.__init__)
    monkeypatch.setattr(Executor, "get_class", lambda config: f"executor of {config}")
    monkeypatch.setattr(LLMEngine, "__init__", lambda *args, **options: made.append(takes.bind(*args, **options)))
    internals.engine_in_this_process("config")
    [given] = made
    assert (given.arguments["vllm_config"], given.arguments["executor_class"]) == ("config", "executor of config")
    assert given.arguments["multiprocess_mode"] is False


def test_an_engine_has_a_core_to_shut_down_and_a_processor_of_outputs(monkeypatch):
    ended, core = [], type("Core", (EngineCoreClient,), {"shutdown": lambda self: ended.append(self)})()
    internals.shut_down(SimpleNamespace(engine_core=core))
    assert ended == [core] and callable(EngineCoreClient.shutdown)
    for kind in (LLMEngine, AsyncLLM):
        assert {"engine_core", "output_processor"} <= set(kind.__init__.__code__.co_names), READ_AGAIN


@pytest.fixture
def engine():
    """An engine's processor of outputs with a request "a" that has sampled two tokens, and "b", which has none yet."""
    processor, aborted = OutputProcessor(None, log_stats=False), []
    for name in ("a", "b"):
        parameters = SamplingParams(max_tokens=9, logprobs=None, flat_logprobs=True, detokenize=False,
                                    output_kind=RequestOutputKind.FINAL_ONLY)
        processor.add_request(EngineCoreRequest(f"{name}-inner", [1, 2], None, parameters, None, 0.0, None, None, None,
                                                external_req_id=name), None)
    processor.process_outputs([EngineCoreOutput("a-inner", [5, 6])])
    return SimpleNamespace(output_processor=processor, abort_request=aborted.extend, aborted=aborted)


def test_tokens_of_unfinished_requests_are_counted(engine):
    assert internals.unfinished_tokens(engine) == 2
    assert internals.unfinished_tokens(None) == 0


def test_open_requests_have_the_ids_that_they_were_given(engine):
    assert internals.open_requests(engine) == {"a", "b"}
    engine.output_processor.abort_requests(["a"], internal=False)
    assert internals.open_requests(engine) == {"b"}


def test_what_was_sampled_is_returned(engine):
    [output] = internals.abort_samples(engine, ["a"])
    assert (output.request_id, output.outputs[0].token_ids, output.outputs[0].finish_reason) == ("a", [5, 6], "abort")
    assert engine.aborted == ["a"]
    [empty] = internals.abort_samples(engine, ["b"])
    assert empty.request_id == "b" and not empty.outputs[0].token_ids


def test_the_setter_of_threads_comes_back():
    original = torch.set_num_threads
    with internals.restored_thread_setter():
        torch.set_num_threads = None
    assert torch.set_num_threads is original


def test_the_registry_has_a_class_for_what_vllm_runs():
    fused = internals.model_class("LlamaForCausalLM").packed_modules_mapping
    assert fused["qkv_proj"] == ["q_proj", "k_proj", "v_proj"]
    assert internals.model_class("NoSuchForCausalLM") is None
    for name in ("Olmo2ForCausalLM", *internals.BACKENDS):
        assert internals.model_class(name).__module__.startswith(internals.TRANSFORMERS), READ_AGAIN


def test_transformers_classes_stay_as_they_are_while_an_engine_starts():
    from vllm.model_executor.models.transformers.base import Base

    decorate, olmo = Base._decorate_cls_for_torch_compile, transformers.Olmo2Model
    with internals.unchanged_transformers_classes(["LlamaForCausalLM"]):
        assert Base._decorate_cls_for_torch_compile is decorate, "vLLM implements it"
    with internals.unchanged_transformers_classes(["Olmo2ForCausalLM"]):
        Base._decorate_cls_for_torch_compile(None, cls=olmo, dynamic_arg_dims=None, enable_if=None, is_encoder=False)
    assert Base._decorate_cls_for_torch_compile is decorate and "__call__" not in vars(olmo)
    assert "_decorate_cls_for_torch_compile" in Base._decorate_for_torch_compile.__code__.co_names, READ_AGAIN


def test_experts_are_the_tensors_of_a_checkpoint():
    tensor = torch.arange(2 * 6 * 4.0).view(2, 6, 4)
    parts = dict(internals.checkpoint_weights(
        transformers.MixtralConfig(architectures=["MixtralForCausalLM"]),
        [("model.layers.3.mlp.experts.gate_up_proj", tensor), ("model.norm.weight", tensor[0])]))
    expected = {f"model.layers.3.block_sparse_moe.experts.{expert}.{name}.weight": part
                for expert in range(2) for name, part in zip(("w1", "w3"), tensor[expert].chunk(2), strict=True)}
    assert parts.keys() == {*expected, "model.norm.weight"}
    assert all(torch.equal(parts[name], part) for name, part in expected.items())


def test_experts_of_gpt_oss_are_passed_one_by_one():
    tensor, name = torch.arange(12.0).view(3, 4), "model.layers.0.mlp.experts.gate_up_proj_bias"
    parts = dict(internals.checkpoint_weights(transformers.GptOssConfig(), [(name, tensor)]))
    assert {key: part.tolist() for key, part in parts.items()} == {
        name.replace("experts.", f"experts.{i}."): tensor[i].tolist() for i in range(3)}
    from vllm.model_executor.models import gpt_oss

    assert "_try_load_streamed_expert" in gpt_oss.GptOssModel._load_weights_other.__code__.co_names, READ_AGAIN


class Layer(nn.Module):
    """A layer whose processed weight is transposed, as a quantization method does it."""

    def __init__(self):
        super().__init__()
        self.quant_method = Transpose()
        self.weight = nn.Parameter(torch.zeros(2, 3), requires_grad=False)
        self.weight.weight_loader = self.load

    def load(self, param, loaded_weight):
        param.data.copy_(loaded_weight)


class Transpose(QuantizeMethodBase):
    def create_weights(self, layer, *args, **options):
        """Not called."""

    def apply(self, layer, *args, **options):
        """Not called."""

    def process_weights_after_loading(self, layer):
        if not getattr(layer, internals.PROCESSED, False):
            layer.weight = nn.Parameter(layer.weight.t().contiguous(), requires_grad=False)
            setattr(layer, internals.PROCESSED, True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer()

    def load_weights(self, weights):
        for _, tensor in weights:
            self.layer.weight.weight_loader(self.layer.weight, tensor)


@pytest.fixture
def model():
    """A model that vLLM has loaded: remembered in the checkpoint's form, then processed."""
    model = Model()
    record_metadata_for_reloading(model)
    internals.process_weights(model.layer)
    assert model.layer.weight.shape == (3, 2)
    return model


def test_the_form_of_a_checkpoint_is_remembered(model):
    shapes = internals.checkpoint_parameters(model.layer)
    assert {name: (tuple(p.shape), p.is_meta) for name, p in shapes.items()} == {"weight": ((2, 3), True)}
    model.layer.register_parameter("later", nn.Parameter(torch.zeros(1)))
    assert set(internals.checkpoint_parameters(model.layer)) == {"weight", "later"}


def test_an_empty_parameter_has_the_loader_of_the_layer(model):
    parameter = internals.empty_parameter(internals.checkpoint_parameters(model.layer)["weight"], model.layer)
    assert parameter.shape == (2, 3) and isinstance(parameter, nn.Parameter)
    assert parameter.weight_loader.__self__ is model.layer
    parameter.weight_loader(parameter, torch.ones(2, 3))
    assert parameter.sum() == 6


def test_weights_are_processed_once_more(model):
    internals.process_weights(model.layer)
    assert model.layer.weight.shape == (2, 3)


def test_a_reload_replaces_the_weights_in_their_processed_form(model):
    kernels = internals.begin_reload(model)
    model.load_weights([("layer.weight", torch.arange(6.0).view(2, 3))])
    internals.finish_reload(model, None, kernels)
    assert torch.equal(model.layer.weight, torch.arange(6.0).view(2, 3).t())


def test_a_head_with_a_packed_copy_is_packed_again():
    packed, head = [], VocabParallelEmbedding.__new__(VocabParallelEmbedding)
    nn.Module.__init__(head)
    head.quant_method = SimpleNamespace(process_weights_after_loading=packed.append)
    model = nn.Sequential(head)
    record_metadata_for_reloading(model)
    for _ in range(2):
        internals.finish_reload(model, None, internals.begin_reload(model))
        head.cpu_linear = torch.nn.functional.linear
    assert packed == [head]
    from vllm.model_executor.layers import utils

    assert "cpu_linear" in utils.dispatch_cpu_unquantized_gemm.__code__.co_names, READ_AGAIN


class Direct(nn.Module):
    """A model with parameters that vLLM's `load_weights` does not load through their weight loaders."""

    def __init__(self):
        super().__init__()
        self.loaded, self.lm_head, self.layers = {}, nn.Linear(2, 3), nn.ModuleList([nn.ModuleDict()])
        self.layers[0]["attn"] = nn.Module()
        self.layers[0]["attn"].sinks = nn.Parameter(torch.zeros(4), requires_grad=False)
        for parameter in (self.lm_head.bias, self.layers[0]["attn"].sinks):
            parameter.weight_loader = lambda param, tensor: param.data.copy_(2 * tensor)

    def load_weights(self, weights):
        self.loaded |= dict(weights)


def test_sinks_and_the_bias_of_a_head_go_through_their_weight_loaders(monkeypatch):
    """This process has the second half of the heads; sinks of other stages of a pipeline are left out."""
    monkeypatch.setattr("vllm.distributed.get_tensor_model_parallel_rank", lambda: 1)
    model, all_heads = Direct(), torch.arange(8.0)
    internals.load_checkpoint_weights(model, [
        ("lm_head.bias", torch.ones(3)), ("layers.0.self_attn.sinks", all_heads),
        ("layers.7.self_attn.sinks", all_heads), ("a", all_heads)])
    assert model.layers[0]["attn"].sinks.tolist() == [8.0, 10.0, 12.0, 14.0]
    assert model.lm_head.bias.tolist() == [2.0] * 3 and list(model.loaded) == ["a"]


class Experts(nn.Module):
    """A layer of experts whose kernel packs them when it is made, as on CPUs."""

    def __init__(self):
        super().__init__()
        self.quant_method = Packing()
        self.weight = nn.Parameter(torch.zeros(2, 3), requires_grad=False)


class Packing(QuantizeMethodBase):
    moe_kernel = None

    def create_weights(self, layer, *args, **options):
        """Not called."""

    def apply(self, layer, *args, **options):
        """Not called."""

    def process_weights_after_loading(self, layer):
        if self.moe_kernel is None:
            self.moe_kernel = SimpleNamespace(fused_experts=SimpleNamespace(process_weights_after_loading=self.pack))
            self.pack(layer)

    def pack(self, layer):
        layer.weight = nn.Parameter(layer.weight.flip(0), requires_grad=False)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts, self.others = Experts(), Experts()

    def load_weights(self, weights):
        for _, tensor in weights:
            loader = getattr(self.experts.weight, "weight_loader", default_weight_loader)
            loader(self.experts.weight, tensor)


@pytest.fixture
def mixture():
    model = Mixture()
    record_metadata_for_reloading(model)
    for layer in (model.experts, model.others):
        internals.process_weights(layer)
    return model


def test_experts_are_packed_again_with_a_copy_of_their_layer(mixture):
    mixture.experts.weight.data = torch.arange(6.0).view(2, 3)
    internals.process_weights(mixture.experts)
    assert torch.equal(mixture.experts.weight, torch.arange(6.0).view(2, 3).flip(0))


def test_a_reload_packs_the_experts_that_it_loads_and_leaves_others(mixture):
    kernels = {layer: layer.quant_method.moe_kernel for layer in (mixture.experts, mixture.others)}
    before = mixture.others.weight.clone()
    removed = internals.begin_reload(mixture)
    assert removed == kernels and mixture.others.quant_method.moe_kernel is None
    mixture.load_weights([("experts.weight", torch.arange(6.0).view(2, 3))])
    internals.finish_reload(mixture, None, removed)
    assert torch.equal(mixture.experts.weight, torch.arange(6.0).view(2, 3).flip(0))
    assert torch.equal(mixture.others.weight, before)
    assert mixture.others.quant_method.moe_kernel is kernels[mixture.others]
    assert mixture.experts.quant_method.moe_kernel is not None
