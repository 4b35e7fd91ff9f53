"""One of two ranks that train a tiny model at every ZeRO stage, whole and by adapters, in float32 and in bfloat16, with
activations kept and made again; what was seen is written as JSON to the file named.

`torch.is_autocast_enabled()` answers here as it does on a GPU, where it speaks of the device that is computed on:
DeepSpeed's engine decides by it whether a pass is made with autocast.

At stage 2 a bucket of gradients holds one of the larger parameters, so there are several of them; at stage 3 nothing
stays gathered after its use. Both are so in large models.
"""

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import Tensor

from rlhf_ray.config.learner import SHARDED_BUCKET, LearnerConfig, LoRAConfig, OptimizerConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.engine import deepspeed_engine, distributed
from rlhf_ray.engine.deepspeed_engine import TrainEngine, deepspeed_config
from rlhf_ray.engine.optimizer_shards import optimizer_shards
from rlhf_ray.models.loading import load_causal_lm
from rlhf_ray.models.lora import Adapters
from rlhf_ray.models.packed_model import Chunks, PackedLanguageModel
from rlhf_ray.models.packing import Packing

VOCAB, LENGTHS = 64, [9, 14, 7]
PREDICTED = torch.tensor([i for i in range(1, sum(LENGTHS)) if i not in (9, 23)])
OPTIMIZER = OptimizerConfig(learning_rate=1.0, betas=(0.0, 0.0), eps=1.0, grad_clip=0.0)
"""Steps of about the gradient's size: nothing is divided by a small number, and no rounding made a whole step."""
STEPS = 2
"""Adapters begin with one of their two factors at zero, and the other has a gradient from the second step on."""
AGAIN = {False: True, True: 0.5}
"""Share of layers that are recomputed, with adapters and without."""
HEAD = "bfloat16 with a float32 head"
CASES = [*product(range(4), (False, True), ("float32", "bfloat16")), *product((0, 3), (False,), (HEAD,))]


def engine(model: str, stage: int, adapters: bool, precision: Any, again: float) -> TrainEngine:
    """`precision` of passes, and of a base that adapters leave as it is."""
    lora, head = LoRAConfig(rank=4) if adapters else None, precision == HEAD
    precision = "bfloat16" if head else precision
    config = LearnerConfig(zero_stage=stage, workers=2, autocast=precision, gradient_checkpointing=again,
                           optimizer=OPTIMIZER, lora=lora)
    torch.manual_seed(5)
    inner = load_causal_lm(ModelConfig(path=model, dtype=precision if adapters else "float32", float32_head=head))
    deepspeed_engine.SHARDED_BUCKET = 1 if stage == 2 else SHARDED_BUCKET
    # Two pieces of logits, each of which the backward pass makes again.
    module = PackedLanguageModel(inner, chunks=Chunks(16 * VOCAB, most_tokens=32))
    if lora:
        Adapters(inner, lora, model, autocast=precision == "bfloat16")
    return TrainEngine(module, config, total_steps=10)


def released(config: LearnerConfig, stage: int, largest: int) -> dict[str, Any]:
    """DeepSpeed's configuration, by which it frees parameters as soon as it can."""
    settings = deepspeed_config(config, stage, largest)
    if stage == 3:
        settings["zero_optimization"] |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    return settings


def fetched(it: TrainEngine, rank: int) -> list[str]:
    """Kinds of modules whose parameters are gathered in an update, at stage 3."""
    kinds, own = [], PartitionedParameterCoordinator.fetch_sub_module

    def fetch(coordinator: Any, module: Any, forward: bool) -> None:
        kinds.append(type(module).__name__)
        own(coordinator, module, forward)

    PartitionedParameterCoordinator.fetch_sub_module = fetch
    it.backward(loss(it, rank))
    it.step()
    PartitionedParameterCoordinator.fetch_sub_module = own
    return kinds


def loss(it: TrainEngine, rank: int) -> Tensor:
    tokens = torch.randint(2, VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(rank))
    logprobs, _ = it.forward(tokens, Packing.of(LENGTHS, "cpu"), PREDICTED)
    return -logprobs.sum() / (2 * len(PREDICTED))


def weights(it: TrainEngine) -> dict[str, Tensor]:
    """What is trained, gathered one by one, as an export does."""
    return {name: it.gather([name])[name].clone() for name, _ in trained(it.module.model)}


def update(it: TrainEngine, rank: int) -> Tensor:
    """[n] how far all trained weights went."""
    before = weights(it)
    for _ in range(STEPS):
        it.backward(loss(it, rank))
        it.step()
    after = weights(it)
    return torch.cat([(after[name] - before[name]).flatten() for name in before])


def passes(it: TrainEngine, rank: int) -> dict[str, Any]:
    """What a pass of training and one without gradients are made in: logits, the norm before them, answers; and
    whether autocast keeps what it casts."""
    inner, found = it.module.model, []
    handles = [inner.get_output_embeddings().register_forward_hook(lambda *call: found.append(
                   [str(call[2].dtype), torch.is_autocast_cache_enabled()]))]
    norm: list[str] = []
    handles.append(inner.base_model.norm.register_forward_hook(lambda *call: norm.append(str(call[2].dtype))))
    tokens = torch.arange(2, 2 + sum(LENGTHS))
    answers = [str(work(tokens, Packing.of(LENGTHS, "cpu"), PREDICTED)[0].dtype) for work in (it.forward, it.infer)]
    for handle in handles:
        handle.remove()
    it.engine.zero_grad()
    return {"logits": found, "norm": norm, "answers": answers, "outside": torch.is_autocast_enabled("cpu")}


def inexact(it: TrainEngine) -> list[str]:
    """Parameters of which what is gathered, alone or with others, is not bit for bit what the optimizer changes."""
    mine, names = it.snapshot().tensors, list(weights(it))
    together, alone = it.gather(names), {name: it.gather([name])[name] for name in names}
    wrong = list(it.gather(names, wanted=False))  # nothing is copied for a rank that only takes part
    for key, kept in mine.items():
        kind, start, name = key.split(":", 2)
        for gathered in (together, alone):
            if kind == "weights":
                whole = gathered[name.removeprefix("model.")].flatten()
                if not torch.equal(whole[int(start) : int(start) + len(kept)], kept):
                    wrong.append(name)
    return wrong


def copied(it: TrainEngine, stage: int) -> bool:
    """Whether what the optimizer changes lies elsewhere than what passes are made with."""
    used = {p.untyped_storage().data_ptr() for p in it.module.parameters()}
    used |= {p.ds_tensor.untyped_storage().data_ptr() for p in it.module.parameters() if stage == 3}
    return all(part.weights.untyped_storage().data_ptr() not in used
               for part in optimizer_shards(it.engine, stage, dict(trained(it.module))))


def trained(module: Any) -> list[Any]:
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def main(model: str, address: str, rank: int) -> dict[str, Any]:
    asked = torch.is_autocast_enabled
    torch.is_autocast_enabled = lambda device="cpu": asked(device)
    deepspeed_engine.deepspeed_config = released
    distributed.join(address, rank, 2, 60.0)
    found: dict[str, Any] = {}
    updates: dict[Any, Tensor] = {}
    for stage, adapters, precision in CASES:
        kept, again = (engine(model, stage, adapters, precision, share) for share in (False, AGAIN[adapters]))
        seen = passes(kept, rank)
        mine = updates[stage, adapters, precision] = update(kept, rank)
        first = updates[0, adapters, precision]
        whole = updates[stage, adapters, "float32"]
        found[f"{stage} {adapters} {precision}"] = {
            **seen, "inexact": inexact(kept), "copied": copied(kept, stage), "size": float(mine.norm()),
            "again": distance(update(again, rank), mine), "stage 0": distance(mine, first),
            "float32": distance(mine, whole), "fetched": fetched(again, rank)}
    return found


def distance(a: Tensor, b: Tensor) -> float:
    """Of two updates, as a share of their size."""
    return float((a - b).norm() / b.norm())


if __name__ == "__main__":
    _, folder, address, rank = sys.argv
    told = main(folder, address, int(rank))
    Path(folder, f"told_{rank}.json").write_text(json.dumps(told))
    distributed.leave()
