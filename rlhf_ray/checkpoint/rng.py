"""The random states of a process, in types that torch.load(weights_only=True) reads.

DeepSpeed's checkpoints omit them, and a resumed run reproduces the uninterrupted one only with them.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from rlhf_ray.errors import CheckpointError


def rng_state() -> dict[str, Any]:
    """States of Python's, NumPy's global and torch's CPU generator, and of CUDA's where this process uses CUDA.

    Returns:
        Tensors, tuples, lists, text and numbers. "cuda" is a list with one state per visible device, empty without
        CUDA.
    """
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    return {
        "python": random.getstate(),
        "numpy": [name, [int(k) for k in keys], position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        # A process that has not used CUDA has no state to save, and a query would allocate a context on every device.
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the states that `rng_state` returned.

    Raises:
        CheckpointError: not such a state, or a state of another number of CUDA devices than this process has.
    """
    devices = torch.cuda.device_count() if state.get("cuda") else 0
    if len(state.get("cuda", [])) != devices:
        raise CheckpointError(
            f"the saved random state is of {len(state['cuda'])} CUDA devices and this process sees {devices}; "
            "resume with the same number of devices per worker"
        )
    try:
        random.setstate(state["python"])
        np.random.set_state(tuple(state["numpy"]))
        torch.set_rng_state(state["torch"])
        if devices:
            torch.cuda.set_rng_state_all(state["cuda"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"not a saved random state: {error!r}") from error
