"""Whether the kernels of this package are used.

Kernels differ in the order of summation, so all ranks and a resumed run must use the same ones. The choice therefore
depends on torch's build, on the devices and the processor, and on precision and shape; it is never the result of a
timing.
"""

import torch
from torch import Tensor


def onednn_is_faster() -> bool:
    """Whether float32 products of this process's models are oneDNN's: it has no GPU, torch includes oneDNN, and the
    processor has AVX-512, which MKL does not use on other makers' processors than Intel's. With AVX2 MKL is as fast,
    and for gradients of weights half as fast again (Zen 3)."""
    return (torch.backends.mkldnn.is_available() and not torch.cuda.is_available()
            and torch.backends.cpu.get_cpu_capability() == "AVX512")


def takes_cpu_kernel(*operands: Tensor, precisions: tuple[torch.dtype, ...] = (torch.float32,)) -> bool:
    """Whether these operands go to a kernel of this package: all of them lie on a CPU in one precision, which is among
    those that the kernel computes in, and autocast is off."""
    kind = operands[0].dtype
    return (kind in precisions and all(x.is_cpu and x.dtype is kind for x in operands)
            and not torch.is_autocast_enabled("cpu"))
