"""Which weights a model has, so that a resume notices another model at the same path, and the same one at another."""

import hashlib
import json
from pathlib import Path

from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.errors import ModelError

TENSOR_BYTES = 4096
"""Bytes of each tensor that are compared: training changes every tensor that it reaches, and reading all of a large
model takes minutes."""
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"


def model_identity(model: ModelConfig | NewModelConfig) -> str:
    """What tells a model from others: of a directory a digest of its tensors' names, shapes and first bytes, however
    they are divided into files; of a model on the Hub its name and revision; of a new model its shape.

    Raises:
        ModelError: a file is damaged or cannot be read.
    """
    if isinstance(model, NewModelConfig):
        return f"new, {model.architecture.model_dump_json()}"
    directory = Path(model.path)
    if not directory.is_dir():
        return model.path if model.revision is None else f"{model.path} at revision {model.revision}"
    tensors: dict[str, bytes] = {}
    for file in _files(directory):
        try:
            tensors |= _tensors(file)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelError(f"{file} is not a readable safetensors file: {error}. Restore it") from error
    digest = hashlib.blake2b(digest_size=6)
    for name in sorted(tensors):
        digest.update(tensors[name])
    return f"digest {digest.hexdigest()}"


def _files(directory: Path) -> list[Path]:
    """The files of weights that are loaded; there may be others beside them."""
    try:
        index = json.loads((directory / INDEX).read_text())
        return sorted({directory / name for name in index["weight_map"].values()})
    except FileNotFoundError:
        whole = directory / WHOLE
        return [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{directory / INDEX} is damaged: {error!r}. Restore it") from error


def _tensors(file: Path) -> dict[str, bytes]:
    """Of each tensor of a safetensors file (the length of the header in 8 bytes, the header in JSON, the tensors) its
    name, type, shape and first bytes, by name."""
    found = {}
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError("it is shorter than its header says")
        for name, tensor in json.loads(content.read(length)).items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                content.seek(8 + length + begin)
                about = json.dumps([name, tensor["dtype"], tensor["shape"]]).encode()
                found[name] = about + content.read(min(end - begin, TENSOR_BYTES))
    return found
