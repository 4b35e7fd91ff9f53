"""A policy learner of one rank that broadcasts its weights to a thread; what arrived is written as JSON.

A process of its own: joining a process group and choosing an accelerator are for life.
"""

import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig

from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.learner import LoRAConfig, PolicyConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.engine import distributed
from rlhf_ray.roles.generator import transfer_info
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.weights.nccl_ipc_backend import VerifiedGlooEngine, offer_info


class Model:
    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Any) -> None:
        self.loaded |= dict(weights)


def beside(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def published(model: ModelConfig, **fields: Any) -> dict[str, Any]:
    """Publish a learner's weights; whether what arrived is what it would give to the object store, and in how many
    buckets of which size it was to come."""
    learner = PolicyLearner(PolicyConfig(**fields), model, 0, 1, 0, 1, AlgorithmConfig(), 1.0)
    if torch.distributed.is_initialized():
        again(learner)
    else:
        learner.start(distributed.free_address("127.0.0.1"), 60.0)
    plan = learner.plan_weights(20_000, [])
    route, receiver = learner.broadcast_route("127.0.0.1", 2), Model()
    config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0),
                             model_config=SimpleNamespace(hf_config=LlamaConfig()))
    engine = VerifiedGlooEngine(None, config, torch.device("cpu"), receiver)  # type: ignore[arg-type]
    joining = beside(lambda: engine.init_transfer_engine(engine.parse_init_info(transfer_info(route, 1))))
    learner.connect_weights(route)
    joining.join()
    same = True
    for index in range(plan.whole.buckets):
        offer = learner.offer_bucket(1, index)
        assert offer is not None
        info = offer_info(offer)
        loading = beside(lambda info=info: engine.update_weights(info))
        learner.send_bucket()
        loading.join()
        bucket = learner.weight_bucket(1, index)
        assert bucket is not None and bucket.entries == offer.entries
        for entry, array in zip(bucket.entries, bucket.arrays, strict=True):
            came = receiver.loaded[entry.name].contiguous().view(-1).view(torch.uint8).numpy()
            same = same and bool((came == array).all())
    learner.release_weights()
    return {"same": same, "tensors": len(receiver.loaded), "buckets": plan.whole.buckets,
            "left_out": len(learner.unchanged_weights() or {})}


def again(learner: PolicyLearner) -> None:
    """`start` of another learner in a process that has joined its group."""
    join, distributed.join = distributed.join, lambda *_: None
    try:
        learner.start("", 60.0)
    finally:
        distributed.join = join


if __name__ == "__main__":
    model = ModelConfig(path=sys.argv[1], dtype="bfloat16")
    adapters = LoRAConfig(rank=2, targets=["q_proj"])
    told = [published(model), published(model, zero_stage=3), published(model, lora=adapters)]
    Path(sys.argv[2]).write_text(json.dumps(told))
    distributed.leave()
