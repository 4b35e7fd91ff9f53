"""Whether the kernels of this package are used.

Kernels differ in the order of summation. The choice depends on torch's build, on the devices and the processor, and on
precision and shape; it is never the result of a timing. So a run that is resumed on the same kind of processor has the
same kernels, and is bit for bit the same; on another kind, sums differ in their last bits, as torch's own do.
"""

import torch
from torch import Tensor


def uses_onednn() -> bool:
    """Whether float32 products of this process's models are oneDNN's: it has no GPU, torch includes oneDNN, and the
    processor has AVX-512. MKL uses AVX-512 on Intel's processors only. With AVX2, MKL is as fast as oneDNN, and 1.5
    times as fast for the gradients of weights (Zen 3). Measured on Zen 3, 4 and 5; Intel and ARM were not."""
    return (torch.backends.mkldnn.is_available() and not torch.cuda.is_available()
            and torch.backends.cpu.get_cpu_capability() == "AVX512")


def takes_cpu_kernel(*operands: Tensor, precisions: tuple[torch.dtype, ...] = (torch.float32,)) -> bool:
    """Whether these operands go to a kernel of this package: all of them lie on a CPU in one precision, which is among
    those that the kernel computes in, and autocast is off."""
    kind = operands[0].dtype
    return (kind in precisions and all(x.is_cpu and x.dtype is kind for x in operands)
            and not torch.is_autocast_enabled("cpu"))
