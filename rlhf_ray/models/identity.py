"""Which weights a model has, so that a resume notices another model at the same path, and the same one at another."""

import hashlib
import json
from pathlib import Path

from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.errors import ModelError

TENSOR_BYTES = 4096
"""Bytes of each tensor that are compared: training changes every tensor that it reaches, and reading all of a large
model takes minutes."""


def model_identity(model: ModelConfig | NewModelConfig) -> str:
    """What tells a model from others: of a directory a digest of its tensors' names, shapes and first bytes, of a model
    on the Hub its name and revision.

    Raises:
        ModelError: a file is damaged or cannot be read.
    """
    if isinstance(model, NewModelConfig):
        return "a new model"
    if not Path(model.path).is_dir():
        return model.path if model.revision is None else f"{model.path} at revision {model.revision}"
    digest = hashlib.blake2b(digest_size=6)
    for file in sorted(Path(model.path).glob("*.safetensors")):
        try:
            _add_file(digest, file)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelError(f"{file} is not a readable safetensors file: {error}. Restore it") from error
    return f"digest {digest.hexdigest()}"


def _add_file(digest: "hashlib.blake2b", file: Path) -> None:
    """Add the header of a safetensors file (its length in 8 bytes, JSON) and the beginning of each tensor."""
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError("it is shorter than its header says")
        tensors = json.loads(content.read(length))
        for name, tensor in sorted(tensors.items()):
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                content.seek(8 + length + begin)
                digest.update(json.dumps([name, tensor["dtype"], tensor["shape"]]).encode())
                digest.update(content.read(min(end - begin, TENSOR_BYTES)))
