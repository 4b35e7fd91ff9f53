"""Bytes of one worker by part at its peak, and what its process takes before it holds a model.

Constants of processes were measured; each names the command. `python -m benchmarks.plan_memory` compares them, and the
formulas that use them, with real workers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
ACTIVATIONS, LOGITS, CACHE = "activations", "logits", "KV cache"
BUFFERS, COPIES, RUNTIME = "buffers", "checkpoint copies", "runtime"
PARTS = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS, CACHE, BUFFERS, COPIES, RUNTIME)
"""In the order in which they are shown."""
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Memory:
    """What one worker holds at most: on each of its GPUs, and in its node's main memory."""

    device: Mapping[str, float] = field(default_factory=dict)
    """Bytes on each GPU by part; nothing for a worker on the CPU."""
    host: Mapping[str, float] = field(default_factory=dict)
    """Bytes of main memory by part."""
    first: Mapping[str, float] = field(default_factory=dict)
    """That of the role's first worker, where it holds more: what is gathered from all is gathered there."""
    fixed: float = 0.0
    """Of the bytes on a device, what is reserved whatever the model needs: vLLM's share of a GPU."""

    @property
    def device_bytes(self) -> float:
        """On each GPU."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> float:
        """In main memory."""
        return sum(self.host.values())

    @property
    def shown(self) -> Mapping[str, float]:
        """The parts where the model lies."""
        return self.device or self.host


def at_the_peak(*moments: Mapping[str, float]) -> dict[str, float]:
    """Of what is held at several moments, that at which it is most."""
    return dict(moments[max(range(len(moments)), key=lambda i: sum(moments[i].values()))])


LEARNER = 680 * MIB
"""A learner's process: Python, torch, transformers, DeepSpeed and its optimizer, Ray."""
ADAPTERS = 50 * MIB
"""More of a learner's with adapters: peft and what it imports."""
SCORER = 555 * MIB
"""A scorer's: Python, torch, transformers, Ray."""
GENERATOR = 740 * MIB
"""A generator's with vLLM in it."""
ENGINE_CORE = 1500 * MIB
"""vLLM's processes beside a generator's own, of AsyncLLM."""
SMALL = 350 * MIB
"""An assembler's, or a process with a reward function: Python, torch, tokenizers, Ray."""
READER = 200 * MIB
"""A process that reads data: Python, numpy, tokenizers, Ray."""
DRIVER = 400 * MIB
"""The command itself."""
RAY_HEAD = 700 * MIB
"""Ray's own processes on a node, the dashboard among them."""
GPU_CONTEXT = 1.0 * GIB
"""Of a GPU, before any tensor: CUDA's context, cuBLAS' and NCCL's workspaces. Assumed; not measured."""
GPU_HOST = 2.5 * GIB
"""Main memory of a process that uses a GPU, beyond what it has without: CUDA's libraries. Assumed; not measured."""
COPIES_ON_CPU = {0: 1, 1: 3, 2: 3}
"""Copies of the trained weights, in float32, that a rank of several holds beside its shares on CPUs, by ZeRO stage: the
bucket of gradients under way, gloo's buffers of what it reduces and gathers, DeepSpeed's flattened tensors. The C
library keeps what is freed (cluster/actor_class.py), so they add up. Found on 33 million weights and two ranks; stage
2 was measured, 1 is taken as 2. At stage 3 they are counted one by one (`learner_memory`)."""
GATHERED = 1e9
"""Weights that DeepSpeed leaves gathered at ZeRO stage 3 before it lets go of some (`stage3_max_live_parameters`, its
default)."""
REDUCE_BUCKET = 5e8
"""Elements of DeepSpeed's buffer for gradients under way (`reduce_bucket_size`, its default)."""
