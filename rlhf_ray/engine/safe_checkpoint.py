"""DeepSpeed's checkpoint files read without running what is in them.

DeepSpeed unpickles its files whole, and a pickle may hold any call. Here only tensors, plain containers and the few
classes below are rebuilt; a file that asks for more is refused before anything of it has run. (A manifest guards
against damage, not against somebody who writes a new one.)
"""

import pickle
import re
from typing import Any

from rlhf_ray.errors import CheckpointError


def read_safely(engine: Any) -> None:
    """Let a DeepSpeed engine load checkpoints in this way from now on; saving stays as it is."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    class SafeCheckpointEngine(TorchCheckpointEngine):  # type: ignore[misc]
        """The plain torch files of DeepSpeed, loaded with an allow-list."""

        def load(self, path: str, map_location: Any = None) -> Any:
            """Errors as in `load_allowed`."""
            return load_allowed(path, map_location)

    engine.checkpoint_engine.__class__ = SafeCheckpointEngine


def load_allowed(path: str, map_location: Any = None) -> Any:
    """What DeepSpeed's `torch.save` wrote to `path`.

    Raises:
        CheckpointError: the file holds something else than tensors, plain types and the classes that DeepSpeed needs.
    """
    import torch

    with torch.serialization.safe_globals(_allowed()):
        try:
            return torch.load(path, map_location=map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            named = re.search(r"GLOBAL (\S+)", str(error))
            raise CheckpointError(f"{path} asks for {named[1] if named else 'objects'} to be run or built, which no "
                                  "checkpoint of ours does, and was not read. Use another checkpoint, and find out who "
                                  "wrote this one.") from error


def _allowed() -> list[Any]:
    """Classes that stand in DeepSpeed's states beside tensors."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address]
