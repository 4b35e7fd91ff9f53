"""What processes hold before they hold a model: constants that were measured, each with the command that did.

`python -m benchmarks.plan_memory` compares them, and the formulas beside them, with real workers.
"""

from rlhf_ray.planning.memory import GIB, MIB

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
library keeps what is freed (cluster/memory.py), so they add up. Found on 33 million weights and two ranks; stage 2 was
measured, 1 is taken as 2. At stage 3 they are counted one by one (`learner_memory`)."""
GATHERED = 1e9
"""Weights that DeepSpeed leaves gathered at ZeRO stage 3 before it lets go of some (`stage3_max_live_parameters`, its
default)."""
REDUCE_BUCKET = 5e8
"""Elements of DeepSpeed's buffer for gradients under way (`reduce_bucket_size`, its default)."""
