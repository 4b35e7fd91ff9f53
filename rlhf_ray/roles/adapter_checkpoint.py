"""What stands in a learner's checkpoint beside its adapters: the base model and the shape they mean something with.

The frozen base is in no checkpoint. It is loaded from where it came from, and its digest tells whether it is the same.
"""

import json
from pathlib import Path

from rlhf_ray.errors import CheckpointError
from rlhf_ray.models.lora import Adapters

DESCRIPTION = "adapters.json"


def save_description(adapters: Adapters, file: Path) -> None:
    """Write `adapters.json`."""
    file.write_text(json.dumps(adapters.describe()))


def check_description(adapters: Adapters | None, directory: Path) -> None:
    """Refuse a checkpoint whose weights are not those of this learner.

    Raises:
        CheckpointError: only one of the two has adapters, or theirs have another base, rank, alpha or layers.
    """
    file = directory / DESCRIPTION
    saved = json.loads(file.read_text()) if file.is_file() else None
    if (saved is None) != (adapters is None):
        had, asks = ("without", "asks for some") if saved is None else ("with", "asks for none")
        raise CheckpointError(f"{directory} was written {had} adapters, and the configuration {asks}; set `lora` back, "
                              "or begin a new run")
    if saved is None or adapters is None:
        return
    now = adapters.describe()
    if saved["base"] != now["base"]:
        raise CheckpointError(f"{directory} holds adapters of another base model: its weights had digest "
                              f"{saved['base']}, those of {adapters.peft_config.base_model_name_or_path!r} have "
                              f"{now['base']}. Bring the model back that the run began with (path and dtype), or begin "
                              "a new run")
    other = [name for name in now if saved[name] != now[name]]
    if other:
        raise CheckpointError(f"{directory} holds adapters of another shape: "
                              + "; ".join(f"{name} was {saved[name]} and is {now[name]}" for name in other)
                              + ". Set `lora` back, or begin a new run")
