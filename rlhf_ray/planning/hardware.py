"""Peak rates of accelerators from data sheets, and the shares of them that programs reach."""

import re
from dataclasses import dataclass, replace
from math import inf


@dataclass(frozen=True)
class Hardware:
    """One kind of accelerator, several to a node. Rates are per second, and per direction where there are two."""

    name: str
    flops: float
    """Peak of dense bfloat16 matrix products on one GPU, FLOP/s."""
    memory_bytes: float
    """Memory of one GPU."""
    memory_bandwidth: float
    """Bandwidth of one GPU's memory, bytes/s."""
    gpus_per_node: int
    link_bandwidth: float
    """Between the GPUs of a node, bytes/s per GPU."""
    network_bandwidth: float
    """Between nodes, bytes/s per node, all its network cards together."""
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
    """Of `memory_bytes`; libraries and fragmentation take the rest (vLLM's own default)."""
    cards: int = 1
    """Network cards of a node. One process sends over one of them, all GPUs of a node together over all."""
    hop_s: float = 3.4e-6
    """Latency of one step of a ring within a node (NCCL's own model, src/graph/tuning.cc: NVLink, ring, simple)."""
    network_hop_s: float = 14e-6
    """Latency of one step of a ring between nodes (the same table: network, ring, simple)."""
    collective_s: float = 20e-6
    """Minimum time of a collective call within a node; assumed."""
    step_s: float = 2e-3
    """Time of a decoding step that does not depend on the model: scheduling and sampling; assumed."""


H100 = Hardware(
    name="H100 SXM", flops=989e12, memory_bytes=80e9, memory_bandwidth=3.35e12, gpus_per_node=8,
    link_bandwidth=450e9, network_bandwidth=400e9, host_bandwidth=50e9, cards=8,
)
"""NVIDIA's data sheet (989 TFLOP/s without sparsity, 80 GB, 3.35 TB/s, NVLink 900 GB/s in both directions), in nodes
with a 400 Gb/s card a GPU as NVIDIA's DGX H100 has; PCIe 5 x16 gives 64 GB/s, of which about 50 are seen."""
H100_PCIE = replace(H100, name="H100 PCIe", flops=756e12, memory_bandwidth=2e12, link_bandwidth=50e9)
"""NVIDIA's data sheet (756 TFLOP/s without sparsity, 80 GB, 2 TB/s); PCIe 5 x16 is also the link, since bridges of
NVLink join two cards only."""
H100_NVL = replace(H100_PCIE, name="H100 NVL", flops=835e12, memory_bytes=94e9, memory_bandwidth=3.9e12)
"""NVIDIA's data sheet (835 TFLOP/s without sparsity, 94 GB, 3.9 TB/s); the rest as the H100 PCIe."""
H200 = Hardware(
    name="H200 SXM", flops=989e12, memory_bytes=141e9, memory_bandwidth=4.8e12, gpus_per_node=8,
    link_bandwidth=450e9, network_bandwidth=400e9, host_bandwidth=50e9, cards=8,
)
"""NVIDIA's data sheet (141 GB, 4.8 TB/s; the rest as the H100)."""
A100 = Hardware(
    name="A100 SXM 80GB", flops=312e12, memory_bytes=80e9, memory_bandwidth=2.04e12, gpus_per_node=8,
    link_bandwidth=300e9, network_bandwidth=200e9, host_bandwidth=25e9, cards=8,
)
"""NVIDIA's data sheet (312 TFLOP/s, 80 GB, 2,039 GB/s, NVLink 600 GB/s in both directions), in nodes with a 200 Gb/s
card a GPU as NVIDIA's DGX A100 has; PCIe 4 x16."""
A100_40 = replace(A100, name="A100 SXM 40GB", memory_bytes=40e9, memory_bandwidth=1.555e12)
"""NVIDIA's data sheet."""
A800 = replace(A100, name="A800 SXM 80GB", link_bandwidth=200e9)
"""The A100 with an NVLink of 400 GB/s in both directions."""
H20 = replace(H100, name="H20 SXM", flops=148e12, memory_bytes=96e9, memory_bandwidth=4e12)
"""Published figures of the H20 (148 TFLOP/s, 96 GB, 4.0 TB/s, NVLink as the H100)."""
B200 = Hardware(
    name="B200 SXM", flops=2250e12, memory_bytes=180e9, memory_bandwidth=8e12, gpus_per_node=8,
    link_bandwidth=900e9, network_bandwidth=400e9, host_bandwidth=50e9, cards=8,
)
"""NVIDIA's data sheets of the DGX B200 (1,440 GB and 64 TB/s for eight, NVLink 1.8 TB/s in both directions) and of the
HGX B200 (36 PFLOP/s in bfloat16 for eight with sparsity, half of that without)."""
B300 = replace(B200, name="B300 SXM", memory_bytes=270e9, network_bandwidth=800e9)
"""NVIDIA's figures of the HGX B300: 36 PFLOP/s in bfloat16 for eight with sparsity, as the B200; 8 TB/s each; NVLink as
the B200; an 800 Gb/s card a GPU. Memory as in the system's name in NVIDIA's MLPerf results (B300-SXM-270GB); some
documents say 288 GB, the bytes of which the driver reports 275,040 MiB."""
L40S = Hardware(
    name="L40S", flops=362e12, memory_bytes=48e9, memory_bandwidth=864e9, gpus_per_node=4,
    link_bandwidth=25e9, network_bandwidth=25e9, host_bandwidth=25e9,
)
"""NVIDIA's data sheet (362 TFLOP/s without sparsity, 48 GB, 864 GB/s); PCIe 4 x16, which is also the link; a 200 Gb/s
card a node is assumed."""
L4 = replace(L40S, name="L4", flops=121e12, memory_bytes=24e9, memory_bandwidth=300e9)
"""NVIDIA's data sheet (121 TFLOP/s without sparsity, 24 GB, 300 GB/s)."""
RTX4090 = replace(L40S, name="GeForce RTX 4090", flops=165e12, memory_bytes=24e9, memory_bandwidth=1008e9)
"""NVIDIA's Ada architecture paper, appendix A (165 TFLOP/s in bfloat16 with float32 sums, 24 GB, 1,008 GB/s)."""
RTX5090 = replace(RTX4090, name="GeForce RTX 5090", flops=209.5e12, memory_bytes=32e9, memory_bandwidth=1792e9,
                  link_bandwidth=50e9, host_bandwidth=50e9)
"""NVIDIA's RTX Blackwell architecture paper, appendix A (209.5 TFLOP/s in bfloat16 with float32 sums, 32 GB, 1,792
GB/s); PCIe 5 x16, which is also the link."""
GPUS = {
    "h100": H100, "h100-pcie": H100_PCIE, "h100-nvl": H100_NVL, "h200": H200, "h20": H20, "a100": A100,
    "a100-40gb": A100_40, "a800": A800, "b200": B200, "b300": B300, "l40s": L40S, "l4": L4, "rtx4090": RTX4090,
    "rtx5090": RTX5090,
}
"""By the name that a person types."""
CORE = Hardware(
    name="CPU core", flops=100e9, memory_bytes=inf, memory_bandwidth=10e9, gpus_per_node=1,
    link_bandwidth=2e9, network_bandwidth=1.25e9, host_bandwidth=0.3e9, training_share=0.7, forward_share=1.0,
    memory_share=1.0, network_share=1.0, usable_memory=1.0, hop_s=0.0, network_hop_s=0.0,
    collective_s=1e-3, step_s=3e-3,
)
"""One thread of a server's processor of about 2024, in float32: the order of magnitude of what `make bench-growth`
finds on two cores of an AMD EPYC (docs/benchmarks.md). Other processors differ by a factor of two and more."""


def gpu_of(name: str) -> Hardware | None:
    """The accelerator whose type `name` contains, such as "H100", "NVIDIA-A100-SXM4-40GB" or "NVIDIA B300 SXM6 AC".
    None for others, among them the smaller chips that laptops have under a desktop card's name.

    Ray's label `ray.io/accelerator-type` and `nvidia-smi` spell types differently.
    """
    letters = name.lower().replace("_", "-").replace(" ", "-")
    if "laptop" in letters:
        return None
    if "a100" in letters and "40g" in letters:
        return A100_40
    plain = letters.replace("-", "")
    keys = (key for key in sorted(GPUS, key=len, reverse=True)
            if re.search(f"{key.replace('-', '')}(?!0)", plain))  # an L40 is no L4
    return next((GPUS[key] for key in keys), None)
