"""One rank that loads a model and shards it, and the most memory of its own that this took, in MiB, as a file's text.

A process of its own: joining a process group is for life, and so is memory that was taken.
"""

import sys
import threading
from pathlib import Path

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.engine import distributed
from rlhf_ray.engine.parameter_shards import shard_parameters
from rlhf_ray.models.loading import load_causal_lm

CONFIG = {"train_micro_batch_size_per_gpu": 1,
          "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


def held() -> float:
    """MiB that this process alone has: pages of files, which it may share, left out."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) / 1024


class Peak(threading.Thread):
    """The most that was held since it was started."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.most = held()
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.002):
            self.most = max(self.most, held())


def main(model: str, address: str, rank: int, world: int, out: str) -> None:
    import deepspeed  # noqa: F401  (before the count begins)
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

    distributed.join(address, rank, world, timeout_s=120.0)
    peak = Peak()
    peak.start()
    module = load_causal_lm(ModelConfig(path=model, dtype="float32"), mapped=True)
    shard_parameters(module, CONFIG)
    peak.over.set()
    kinds = {str(p.ds_tensor.dtype) for p in module.parameters()}
    whole = sum(p.ds_numel for p in module.parameters()) / 2**18
    Path(out).write_text(f"{peak.most - peak.before} {whole} {' '.join(kinds)}")
    distributed.leave()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
