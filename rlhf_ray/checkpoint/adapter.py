"""Adapters on their own, in peft's format: adapter_model.safetensors, adapter_config.json, a card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rlhf_ray.checkpoint.export import replacing_export
from rlhf_ray.checkpoint.model_card import ModelCardInfo, adapter_card
from rlhf_ray.observability.owner_record import Term

if TYPE_CHECKING:
    from peft import PeftConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def export_adapter(config: PeftConfig, state: Mapping[str, torch.Tensor], directory: Path, card: ModelCardInfo,
                   term: Term | None = None) -> Path:
    """Write adapters that `peft.PeftModel.from_pretrained(base, directory)` loads, replacing an older export at once.

    Args:
        config: of the adapters, naming their base model.
        state: trained tensors in CPU memory, by the names of peft's files ("base_model.model....lora_A.weight").
        term: of the owner of the run's directory, where `directory` lies in one.

    Returns:
        `directory`.

    Raises:
        CheckpointError: the disk is full, or something other than an export stands at `directory`. What was there
            before is untouched then.
        SupersededError: another driver owns the run's directory now.
    """
    from safetensors.torch import save_file

    size = sum(tensor.nbytes for tensor in state.values())
    with replacing_export(directory, size, CONFIG, term) as new:
        save_file({name: t.contiguous() for name, t in state.items()}, new / WEIGHTS, metadata={"format": "pt"})
        config.save_pretrained(str(new))
        adapter_card(card, Path(directory).name).save(new / "README.md")
    return Path(directory).absolute()
