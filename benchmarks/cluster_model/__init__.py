"""A 70B policy on 64 to 1024 GPUs, on paper: which split of pools, which staleness, and what bounds it.

`python -m benchmarks.cluster_model` prints tables and writes a page; `rlhf_ray.planning` does the arithmetic.
"""
