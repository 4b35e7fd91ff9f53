"""What needs an NVIDIA GPU, and is skipped without one."""

import pytest


@pytest.fixture(autouse=True)
def gpu():
    """The first GPU."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here, or torch is not its CUDA build")
    return torch.device("cuda", 0)
