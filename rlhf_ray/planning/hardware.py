"""What machines can do: peaks from data sheets, and the shares of them that programs reach."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """One kind of accelerator in nodes of several. Rates are a second, a direction where there are two."""

    name: str
    flops: float
    """Peak of dense bfloat16 matrix products on one GPU, FLOP/s."""
    memory_bytes: float
    """Of one GPU."""
    memory_bandwidth: float
    """Of one GPU's memory, bytes/s."""
    gpus_per_node: int
    link_bandwidth: float
    """Between the GPUs of a node, bytes/s a GPU."""
    network_bandwidth: float
    """Between nodes, bytes/s a node, all its cards together."""
    host_bandwidth: float
    """From a node's main memory to one of its GPUs, bytes/s."""
    training_share: float = 0.40
    """Of `flops` in forward and backward passes (Llama 3 reports 38 to 43%: Dubey et al. 2024, table 4)."""
    forward_share: float = 0.50
    """Of `flops` in forward passes of long inputs; assumed between training's and a plain matrix product's."""
    memory_share: float = 0.70
    """Of `memory_bandwidth` while decoding; assumed (Pope et al. 2022 see about that on their largest models)."""
    network_share: float = 0.80
    """Of `network_bandwidth` and `link_bandwidth` in large collective calls; assumed."""
    usable_memory: float = 0.90
    """Of `memory_bytes`; the rest is the libraries' and lost between blocks (vLLM's own default)."""
    collective_s: float = 20e-6
    """Least time of a collective call within a node; assumed."""
    step_s: float = 2e-3
    """Time of a decoding step that does not depend on the model: scheduling and sampling; assumed."""


H100 = Hardware(
    name="H100 SXM", flops=989e12, memory_bytes=80e9, memory_bandwidth=3.35e12, gpus_per_node=8,
    link_bandwidth=450e9, network_bandwidth=400e9, host_bandwidth=50e9,
)
"""NVIDIA's data sheet (989 TFLOP/s without sparsity, 80 GB, 3.35 TB/s, NVLink 900 GB/s in both directions), in nodes
with a 400 Gb/s card a GPU as NVIDIA's DGX H100 has; PCIe 5 x16 gives 64 GB/s, of which about 50 are seen."""
H200 = Hardware(
    name="H200 SXM", flops=989e12, memory_bytes=141e9, memory_bandwidth=4.8e12, gpus_per_node=8,
    link_bandwidth=450e9, network_bandwidth=400e9, host_bandwidth=50e9,
)
"""NVIDIA's data sheet (141 GB, 4.8 TB/s; the rest as the H100)."""
GPUS = {"h100": H100, "h200": H200}
