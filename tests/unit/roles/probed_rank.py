"""One of two ranks of learners that are compared with transformers as they start; what happened is written as JSON.

A process of its own: joining a process group and choosing an accelerator are for life.
"""

import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_ray.config.learner import LearnerConfig, LoRAConfig, OptimizerConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.supervised_records import Sequences
from rlhf_ray.engine import distributed
from rlhf_ray.errors import ModelError
from rlhf_ray.models import parity
from rlhf_ray.models.cpu import linear
from rlhf_ray.records import offsets_of
from rlhf_ray.roles.micro_batch import AverageMeter
from rlhf_ray.roles.supervised_learner import RewardModelLearner, SFTLearner, SupervisedLearner

KINDS: dict[str, dict[str, Any]] = {
    **{f"ZeRO-{stage}": {"zero_stage": stage} for stage in (0, 1, 3)},
    "ZeRO-3, bfloat16": {"zero_stage": 3, "autocast": "bfloat16", "gradient_checkpointing": True},
    **{f"ZeRO-{stage}, adapters": {"zero_stage": stage, "lora": LoRAConfig(rank=2, dropout=0.1),
                                   "gradient_checkpointing": True} for stage in (0, 3)},
}
LONGEST = 140


def learner(cls: type[SupervisedLearner], model: ModelConfig, rank: int, fields: dict[str, Any]) -> SupervisedLearner:
    config = LearnerConfig(micro_batch_tokens=256, optimizer=OptimizerConfig(learning_rate=0.01), **fields)
    return cls(config, model, rank, 2, 0, 10, 2, longest=LONGEST)


def digest(values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()


def untouched(it: SupervisedLearner) -> dict[str, str]:
    """What a comparison must leave alone, by name."""
    module = it.engine.module
    torch_state, numpy_state = torch.get_rng_state().numpy().tobytes(), np.random.get_state()
    return {
        "torch's random state": digest(torch_state),
        "numpy's": digest([x if isinstance(x, str) else np.asarray(x).tolist() for x in numpy_state]),
        "python's": digest(random.getstate()),
        "gradients": digest([p.grad is None for p in module.parameters()]),
        "modes": digest([layer.training for layer in module.modules()]),
        "trained": digest([p.requires_grad for p in module.parameters()]),
        "attention": module.model.config._attn_implementation,
        "layers": digest([type(layer).__name__ for layer in module.modules()]),
        "parts": digest([(getattr(p, "ds_status", None), tuple(p.shape)) for p in module.parameters()]),
        "weights": digest([getattr(p, "ds_tensor", p).detach().float().numpy().tobytes() for p in module.parameters()]),
        "hooks": digest([(len(layer._forward_hooks), len(layer._forward_pre_hooks)) for layer in module.modules()]),
        "forward": str("forward" in vars(module)),
    }


def update(it: SupervisedLearner) -> str:
    """Digest of the weights after two optimizer steps."""
    random_rows = np.random.default_rng(4)
    lengths = random_rows.integers(3, 30, 6)
    rows = Sequences(offsets_of(lengths), random_rows.integers(2, 40, lengths.sum()).astype(np.int32),
                     np.ones(lengths.sum(), dtype=bool))
    for _ in range(2):
        for share in it.shares(rows, it.loss, AverageMeter()):
            it.engine.backward(share)
        it.engine.step()
    return digest([getattr(p, "ds_tensor", p).detach().float().numpy().tobytes()
                   for p in it.engine.module.parameters()])


def compared(model: ModelConfig, rank: int, address: str) -> dict[str, Any]:
    """Of each kind: what a comparison says and what it changes, and whether updates are those without one."""
    found, check = {}, parity.ParityProbe.check

    def watch(it: SupervisedLearner, changed: dict[str, Any]) -> Any:
        def watched(probe: Any, who: str) -> dict[str, float]:
            before = untouched(it)
            told = check(probe, who)
            it.engine.release_gathered()

            changed.update({"told": told, "changed": [k for k, v in untouched(it).items() if before[k] != v]})
            return told

        return watched

    for name, fields in KINDS.items():
        changed: dict[str, Any] = {}
        updates = []
        for probed in (True, False):
            it = learner(SFTLearner, model, rank, fields)
            parity.ParityProbe.check = watch(it, changed) if probed else lambda *_: {}  # type: ignore[method-assign]
            it.start(address, 60.0)
            updates.append(update(it))
        found[name] = {**changed, "same_update": updates[0] == updates[1]}
    parity.ParityProbe.check = check  # type: ignore[method-assign]
    return found


def refused(model: ModelConfig, rank: int, address: str, stage: int) -> str:
    """What a start says where products of weights' gradients are wrong, on rank 1 alone where ranks work together."""
    right = linear._weight_gradient
    if rank == 1 or stage < 3:
        linear._weight_gradient = lambda grad, x: 1.05 * right(grad, x)
    try:
        learner(SFTLearner, model, rank, {"zero_stage": stage}).start(address, 60.0)
        return "nothing"
    except ModelError as error:
        return str(error)
    finally:
        linear._weight_gradient = right


def main(path: str, rank: int, address: str) -> dict[str, Any]:
    model = ModelConfig(path=path)
    distributed.join(address, rank, 2, 60.0)
    scalar = [learner(RewardModelLearner, model, rank, {"zero_stage": stage}).start(address, 60.0) for stage in (1, 3)]
    return {"kinds": compared(model, rank, address), "scalar": scalar,
            "refused": [refused(model, rank, address, stage) for stage in (1, 3)]}


if __name__ == "__main__":
    path, rank, address, target = sys.argv[1:]
    Path(target).write_text(json.dumps(main(path, int(rank), address)))
    distributed.leave()
