"""Activations that are counted, beside those that torch saves for a backward pass."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhf_ray.config.learner import LearnerConfig, LoRAConfig
from rlhf_ray.engine.deepspeed_engine import recompute_layers
from rlhf_ray.models import packed_model
from rlhf_ray.models.attention import register
from rlhf_ray.models.cpu.linear import use_onednn
from rlhf_ray.models.lora import Adapters
from rlhf_ray.models.packed_model import PackedLanguageModel
from rlhf_ray.models.packing import Packing
from rlhf_ray.planning import activations
from rlhf_ray.planning.activations import FLOAT, MicroBatch, layer_bytes, logits_bytes, training_bytes
from rlhf_ray.planning.learner_memory import Training, learner_memory
from rlhf_ray.planning.model_shape import ModelShape

ROWS = 4


def saved_bytes(shape, length, checkpointing=False, adapters=None, half=False):
    """Of all tensors that a forward pass saves, each storage once, weights left out.

    Args:
        adapters: put such adapters on a base in bfloat16.
        half: under autocast to bfloat16.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, intermediate_size=shape.intermediate, vocab_size=shape.vocabulary))
    model.set_attn_implementation(register())
    if checkpointing:
        recompute_layers(model, checkpointing)
    if adapters:
        Adapters(model.bfloat16(), adapters, "base", autocast=half)
    packed = PackedLanguageModel((model if adapters else use_onednn(model)).train())
    weights, seen, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}, []

    def note(tensor):
        kept.append(tensor)  # or its storage could come again
        if tensor.untyped_storage().data_ptr() not in weights:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = torch.randint(shape.vocabulary, (ROWS * length,))
    predicted = torch.arange(ROWS * length)[torch.arange(ROWS * length) % length > 0]
    with (torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
          torch.autocast("cpu", torch.bfloat16, enabled=half)):
        logprobs, _ = packed(tokens, Packing.of(np.full(ROWS, length)), predicted)
    assert logprobs.requires_grad
    return sum(seen.values())


@pytest.mark.parametrize(("kv_heads", "length"), [(4, 64), (4, 192), (2, 64), (1, 256)])
def test_what_a_forward_pass_keeps_is_what_is_counted(kv_heads, length):
    shape = ModelShape(hidden=128, layers=3, heads=4, kv_heads=kv_heads, intermediate=320, vocabulary=512)
    micro_batch = MicroBatch(ROWS * length, length, on_gpu=False)
    answers = ROWS * (length - 1)
    counted = training_bytes(shape, micro_batch) + logits_bytes(shape, micro_batch, answers)
    # Long rows of one length, as here, are answered without the copy that rows of several lengths need.
    assert counted == pytest.approx(saved_bytes(shape, length), rel=0.06)


@pytest.mark.parametrize("share", [1 / 3, 0.5, True])
def test_layers_that_are_passed_again_keep_their_input_alone(share):
    shape = ModelShape(hidden=128, layers=6, heads=4, kv_heads=4, intermediate=320, vocabulary=512)
    micro_batch = MicroBatch(ROWS * 64, 64, on_gpu=False, checkpointing=share)
    recomputed = micro_batch.tokens * layer_bytes(shape, micro_batch)
    kept = training_bytes(shape, micro_batch) - recomputed
    counted = kept + logits_bytes(shape, micro_batch, ROWS * 63)
    assert counted == pytest.approx(saved_bytes(shape, 64, checkpointing=share), rel=0.1)


def test_logits_come_in_pieces_of_bounded_size():
    shape = ModelShape(hidden=8, layers=1, heads=1, kv_heads=1, intermediate=8, vocabulary=2**17)
    micro_batch = MicroBatch(4096, 64, on_gpu=False)
    assert logits_bytes(shape, micro_batch, 4096, gradients=1) == 2 * 2**26 * FLOAT
    assert logits_bytes(shape, micro_batch, 16, gradients=1) == 2 * 16 * 2**17 * FLOAT
    assert logits_bytes(shape, micro_batch, 16, gradients=1, copies=2) == 4 * 16 * 2**17 * FLOAT
    assert logits_bytes(shape.headless(), micro_batch, 4096, gradients=1) == 0


def test_logits_of_a_float32_head_take_four_bytes_and_cpus_convert_its_weight():
    shape = ModelShape(hidden=8, layers=1, heads=1, kv_heads=1, intermediate=8, vocabulary=2**17)
    half = MicroBatch(4096, 64, on_gpu=True, half=True)
    head = replace(half, float32_head=True)
    assert [logits_bytes(shape, each, 16, gradients=1) / 2**17 for each in (half, head)] == [2 * 16 * 2, 2 * 16 * 4]
    on_cpu = replace(head, on_gpu=False)
    assert logits_bytes(shape, on_cpu, 16, gradients=1) / 2**17 == 2 * 16 * 4 + 8 * 4
    alone = replace(on_cpu, half=False)
    assert logits_bytes(shape, alone, 16) == logits_bytes(shape, replace(alone, float32_head=False), 16)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("autocast", ["bfloat16", "float32"])
def test_of_what_adapters_on_a_half_base_keep_nothing_is_left_out(autocast, dropout):
    """Counted for each layer, from models of two sizes."""
    lora, saved, counted = LoRAConfig(rank=2, dropout=dropout), [], []
    for layers in (1, 3):
        shape = ModelShape(hidden=64, layers=layers, heads=4, kv_heads=1, intermediate=224, vocabulary=64)
        saved.append(saved_bytes(shape, 128, adapters=lora, half=autocast == "bfloat16"))
        config = LearnerConfig(gpus=1, autocast=autocast, lora=lora, micro_batch_tokens=ROWS * 128,
                               compile_layers=False)
        memory = learner_memory(config, Training(shape, 128, 1.0, ROWS)).device
        counted.append(memory["activations"])
    assert 1.0 <= (counted[1] - counted[0]) / (saved[1] - saved[0]) < 1.45


def test_as_many_logits_are_counted_as_there_are():
    for name in ("CPU_ELEMENTS", "GPU_ELEMENTS", "KEPT_ELEMENTS"):
        assert getattr(activations, name) == getattr(packed_model, name)
    chunks = packed_model.Chunks()
    assert [chunks.count(tokens, 2**17, on_gpu=True) for tokens in (2**10, 2**11)] == [1, 2]
    assert [chunks.count(tokens, 2**17, on_gpu=True, gradients=True) for tokens in (2**14, 2**15)] == [1, 2]
    assert replace(chunks, recomputed=True).count(2**11, 2**17, on_gpu=True, gradients=True) == 2
    assert [chunks.count(tokens, 2**17, gradients=True) for tokens in (2**9, 2**10)] == [1, 2]
    shape = ModelShape(hidden=8, layers=1, heads=1, kv_heads=1, intermediate=8, vocabulary=2**17)
    on_gpu = MicroBatch(2**15, 64, on_gpu=True, half=True)
    assert [logits_bytes(shape, on_gpu, 2**15, gradients) for gradients in (0, 1, 2)] == [2**28, 2**33, 3 * 2**32]
    assert logits_bytes(shape, replace(on_gpu, checkpointing=True), 2**15, 1) == 2**29
