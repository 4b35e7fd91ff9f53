"""Bytes of one worker by part at its peak, and what its process takes before it holds a model.

Constants of processes were measured; each names the command. `python -m benchmarks.plan_memory` compares them, and the
formulas that use them, with real workers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
ACTIVATIONS, LOGITS, CACHE = "activations", "logits", "KV cache"
BUFFERS, COPIES, RUNTIME, ENVIRONMENTS = "buffers", "checkpoint copies", "runtime", "environments"
PARTS = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS, CACHE, BUFFERS, COPIES, RUNTIME, ENVIRONMENTS)
"""All parts, in the order in which they are shown."""
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Memory:
    """Peak memory of one worker: on each of its GPUs, and in its node's main memory."""

    device: Mapping[str, float] = field(default_factory=dict)
    """Bytes on each GPU by part; empty for a worker on the CPU."""
    in_rollouts: Mapping[str, float] = field(default_factory=dict)
    """The same of a learner between its updates, while it scores rollouts; empty for other roles."""
    host: Mapping[str, float] = field(default_factory=dict)
    """Bytes of main memory by part."""
    first: Mapping[str, float] = field(default_factory=dict)
    """Bytes of main memory of the role's first worker, if it holds more because it gathers from all others."""

    @property
    def device_bytes(self) -> float:
        """Total on each GPU."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> float:
        """Total in main memory."""
        return sum(self.host.values())

    @property
    def shown(self) -> Mapping[str, float]:
        """The parts of the memory that holds the model."""
        return self.device or self.host


def peak_of(*moments: Mapping[str, float]) -> dict[str, float]:
    """The moment with the largest total, of several."""
    return dict(moments[max(range(len(moments)), key=lambda i: sum(moments[i].values()))])


LEARNER = 680 * MIB
"""Process of a learner, or of a scorer with a sharded model: Python, torch, transformers, DeepSpeed and its optimizer,
Ray."""
ADAPTERS = 50 * MIB
"""Additional memory of a learner with adapters: peft and its imports."""
SCORER = 555 * MIB
"""Scorer process: Python, torch, transformers, Ray."""
GENERATOR = 740 * MIB
"""Generator process, with vLLM imported."""
ENGINE_CORE = 1500 * MIB
"""Additional processes of AsyncLLM."""
SMALL = 350 * MIB
"""Assembler process, or a process with a reward function: Python, torch, tokenizers, Ray."""
ENVIRONMENT = 25 * MIB
"""Process of environments before it imports anything of a user: Python and the standard library. Measured (23 MiB) with
two processes of a function as a tool, as `SCHEMAS`."""
SCHEMAS = 220 * MIB
"""Additional memory of the first process of each environment, which describes its tools with transformers
(`utils.get_json_schema`)."""
READER = 200 * MIB
"""Process that reads data: Python, numpy, tokenizers, Ray."""
DRIVER = 400 * MIB
"""Process of the command."""
RAY_HEAD = 700 * MIB
"""Ray's own processes on a node, including the dashboard."""
GPU_CONTEXT = 1.0 * GIB
"""GPU memory before any tensor: CUDA's context, cuBLAS' and NCCL's workspaces. 1.28 GiB on an H200 (docs/gpu.md); GPUs
with fewer multiprocessors need less."""
GPU_HOST = 2.5 * GIB
"""Additional main memory of a process that uses a GPU: CUDA's libraries. Assumed; not measured."""
COPIES_ON_CPU = {0: 1, 1: 3, 2: 3}
"""Float32 copies of the trained weights that each of several ranks on CPUs holds in addition to its shards, by ZeRO
stage: the bucket of gradients being reduced, gloo's buffers, DeepSpeed's flattened tensors. The C
library keeps what is freed (workers/actor_class.py), so they add up. Measured with 33 million weights and two ranks at
stage 2; stage 1 is assumed equal. At stage 3 they are counted individually (`learner_memory`)."""
GATHERED = 1e9
"""Weights that DeepSpeed keeps gathered at ZeRO stage 3 before it releases some (default of
`stage3_max_live_parameters`)."""
REDUCE_BUCKET = 5e8
"""Elements of DeepSpeed's buffer for gradients being reduced (default of `reduce_bucket_size`)."""


def gib(amount: float) -> str:
    """Bytes as text, in GiB or MiB."""
    return f"{amount / GIB:.1f} GiB" if amount >= GIB else f"{amount / MIB:.0f} MiB"
