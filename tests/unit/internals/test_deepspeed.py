"""DeepSpeed's internals are as `rlhf_ray.internals.deepspeed` describes them. Its own code runs here on plain objects,
without an engine; `tests/unit/engine` runs the engine."""

import inspect
import sys
from types import SimpleNamespace

import deepspeed.ops
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.torch import build_shm_op
from deepspeed.runtime import compiler
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import leaf_module_config
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import z3_leaf_module
from deepspeed.utils.tensor_fragment import get_hp_fragment_mapping
from torch import nn

from rlhf_ray.internals import deepspeed as internals

READ_AGAIN = "DeepSpeed has changed: read rlhf_ray/internals/deepspeed.py against its sources"


@pytest.mark.parametrize("kind", [DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3])
def test_a_wrapper_keeps_the_optimizer(kind):
    assert "self.optimizer = init_optimizer" in inspect.getsource(kind.__init__), READ_AGAIN
    wrapped = object()
    engine = SimpleNamespace(optimizer=SimpleNamespace(optimizer=wrapped))
    assert internals.wrapped_optimizer(engine, 1) is wrapped
    assert internals.wrapped_optimizer(engine, 0) is engine.optimizer


def test_the_mapping_of_a_partition_is_the_fragment():
    """A parameter of 10 elements at 3 of the flattened group, of which this rank has 5 to 15: 2 to 10."""
    parameter, flat = nn.Parameter(torch.arange(10.0)), torch.arange(100.0, 110.0)
    parameter._hp_mapping = get_hp_fragment_mapping(parameter, 3, flat, {}, {}, False, 0, 5, 10)
    optimizer = SimpleNamespace(single_partition_of_fp32_groups=[flat])
    start, weights, owner, offset = internals.partitioned_fragment(parameter, optimizer)
    assert (start, offset) == (2, 0) and owner is flat
    assert weights.tolist() == list(range(100, 108)) and weights.data_ptr() == flat.data_ptr()
    parameter._hp_mapping = None
    assert internals.partitioned_fragment(parameter, optimizer) is None
    assert "_hp_mapping" in sys.modules["deepspeed.utils.mixed_precision_linkage"].link_hp_params.__code__.co_names, (
        READ_AGAIN)
    assert "single_partition_of_fp32_groups" in DeepSpeedZeroOptimizer.__init__.__code__.co_names, READ_AGAIN


def test_the_position_of_a_gradient_is_that_of_the_shard():
    """Two parameters in one group, of 4 and 5 elements, sharded by two ranks."""
    group = []
    for number, size in enumerate((4, 5)):
        parameter = nn.Parameter(torch.zeros(0))
        parameter.ds_id, parameter.ds_numel, parameter.ds_shape = number, size, torch.Size([size])
        parameter.ds_tensor = torch.zeros(-(-size // 2))
        parameter.ds_tensor.ds_numel = -(-size // 2)
        parameter.partition_numel = lambda p=parameter: p.ds_tensor.ds_numel
        group.append(parameter)
    flat = torch.arange(5.0)
    optimizer = SimpleNamespace(fp16_groups=[group], grad_position={}, fp32_partitioned_groups_flat=[flat])
    optimizer.get_param_id = lambda p: DeepSpeedZeroOptimizer_Stage3.get_param_id(optimizer, p)
    DeepSpeedZeroOptimizer_Stage3.set_grad_positions(optimizer)
    fragments = [internals.sharded_fragment(p, optimizer, 1) for p in group]
    assert [(f.start, f.weights.tolist(), f.offset) for f in fragments] == [(2, [0, 1], 0), (3, [2, 3], 2)]
    assert all(f.owner is flat for f in fragments)
    assert "fp32_partitioned_groups_flat" in DeepSpeedZeroOptimizer_Stage3.__init__.__code__.co_names, READ_AGAIN


def test_sharded_parameters_carry_their_shape_and_shard():
    code = inspect.getsource(Init)
    assert [name for name in ("ds_id", "ds_shape", "ds_numel", "ds_tensor") if f"param.{name} = " not in code] == [], (
        READ_AGAIN)
    plain, sharded = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(0))
    sharded.ds_id, sharded.ds_shape, sharded.ds_tensor = 0, (2, 3), torch.ones(4)
    assert not internals.is_sharded(plain) and internals.is_sharded(sharded)
    assert internals.full_shape(plain) == internals.full_shape(sharded) == torch.Size([2, 3])
    assert internals.managed_shard(sharded).data_ptr() == sharded.ds_tensor.data_ptr()


def test_gathered_parameters_can_be_released(monkeypatch):
    released, offload = [], DeepSpeedZeRoOffload.__new__(DeepSpeedZeRoOffload)
    monkeypatch.setattr(DeepSpeedZeRoOffload, "partition_all_parameters", lambda own: released.append(own))
    internals.release_gathered(SimpleNamespace(optimizer=SimpleNamespace(parameter_offload=offload)))
    assert released == [offload]
    assert "parameter_offload" in DeepSpeedZeroOptimizer_Stage3.__init__.__code__.co_names, READ_AGAIN


def test_layers_are_gathered_as_wholes_from_the_next_pass_on(monkeypatch):
    calls, offload = [], DeepSpeedZeRoOffload.__new__(DeepSpeedZeRoOffload)
    for name in ("destroy", "setup_zero_stage3_hooks"):
        monkeypatch.setattr(DeepSpeedZeRoOffload, name, lambda own, called=name: calls.append(called))
    layer = nn.Linear(2, 2)
    internals.gather_together(SimpleNamespace(optimizer=SimpleNamespace(parameter_offload=offload)), [layer])
    assert calls == ["destroy", "setup_zero_stage3_hooks"] and z3_leaf_module(layer)
    assert "z3_leaf_module" in DeepSpeedZeRoOffload._register_deepspeed_module.__code__.co_names, READ_AGAIN


def test_experts_are_not_marked(monkeypatch):
    classes = leaf_module_config.DEFAULT_LEAF_MODULE_CLASSES
    assert any("qwen3_moe" in name for name in classes), READ_AGAIN
    monkeypatch.setattr(leaf_module_config, "DEFAULT_LEAF_MODULE_CLASSES", list(classes))
    assert leaf_module_config.DeepSpeedZeroLeafModuleConfig().classes == classes
    internals.mark_no_experts()
    assert leaf_module_config.DeepSpeedZeroLeafModuleConfig().classes == []


def test_autocast_follows_the_engine_s_configuration():
    for enabled in (True, False):
        engine = SimpleNamespace(torch_autocast_enabled=lambda on=enabled: on,
                                 torch_autocast_dtype=lambda: torch.bfloat16)
        with internals.autocast(engine):
            assert torch.is_autocast_enabled("cpu") == enabled


def test_the_backward_pass_asks_whether_to_reduce_gradients():
    engine = SimpleNamespace(enable_backward_allreduce=True)
    internals.leave_gradients_unreduced(engine)
    assert not engine.enable_backward_allreduce
    assert inspect.getsource(DeepSpeedEngine).count("if self.enable_backward_allreduce and") >= 2, READ_AGAIN


def test_an_optimizer_s_state_moves_and_comes_back():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    before = optimizer.state[parameter]["exp_avg"].clone()
    internals.offload_optimizer(optimizer, pin=False)
    internals.reload_optimizer(optimizer, torch.device("cpu"))
    assert torch.equal(optimizer.state[parameter]["exp_avg"], before)


def test_a_kernel_that_is_skipped_is_not_built(monkeypatch):
    class Builder:
        """The only kernel that the first `init_distributed` asks for."""

        NAME, load = "deepspeed_shm_comm", lambda _: pytest.fail(READ_AGAIN)

    assert get_accelerator().create_op_builder("ShareMemCommBuilder").NAME == Builder.NAME, READ_AGAIN
    monkeypatch.setattr(get_accelerator(), "create_op_builder", lambda name: Builder())
    monkeypatch.setitem(vars(deepspeed.ops), "__compatible_ops__", {Builder.NAME: True})
    internals.skip_shared_memory_kernel()
    assert build_shm_op() is None


def test_muon_is_imported_with_a_compiler_that_does_nothing(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("deepspeed.runtime.zero.muon.")]:
        monkeypatch.delitem(sys.modules, name)
    compiled, original = [], lambda *_, **__: lambda function: compiled.append(function) or function
    monkeypatch.setattr(compiler, "compile", original)
    internals.import_muon_uncompiled()
    assert "deepspeed.runtime.zero.muon.muon_optimizer" in sys.modules and not compiled
    assert compiler.compile is original
    assert "deepspeed.runtime.zero.muon.original_muon" in sys.modules, READ_AGAIN
