"""An 8B, a 70B and a mixture of experts on 8 to 1,024 GPUs, on paper, beside figures that other systems published.

`python -m benchmarks.cluster_model` prints tables and writes a page; `rlhf_ray.planning` does the arithmetic, as for
`rlhf-ray plan`.
"""
