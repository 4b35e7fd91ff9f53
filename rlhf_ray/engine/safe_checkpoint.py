"""DeepSpeed's checkpoint files read without running what is in them.

DeepSpeed unpickles its files whole, and a pickle may hold any call. Here only tensors, plain containers and the few
classes below are rebuilt; a file that asks for more is refused before anything of it has run. (A manifest guards
against damage, not against somebody who writes a new one.)
"""

from typing import Any

from rlhf_ray.checkpoint.tensors import load_tensors


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
    return load_tensors(path, _allowed(), map_location)


def _allowed() -> list[type]:
    """Classes that stand in DeepSpeed's states beside tensors."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address]
