"""Weights of a model, named by their digest."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

Tensors = Mapping[str, NDArray[np.float32]]


def digest_of(tensors: Tensors) -> str:
    """Digest of tensors by name, in float32."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode() + np.ascontiguousarray(tensors[name], dtype=np.float32).tobytes())
    return digest.hexdigest()


def keep(tensors: Tensors, directory: Path) -> None:
    """Write them to a file named by their digest, if there is none."""
    file = directory / f"{digest_of(tensors)}.safetensors"
    if not file.exists():
        directory.mkdir(exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        save_file(dict(tensors), unfinished)
        unfinished.replace(file)


def load_weights(directory: Path, digest: str) -> Tensors | None:
    """The tensors of a digest; None if they were not kept, or changed since."""
    file = directory / f"{digest}.safetensors"
    tensors = load_file(file) if file.exists() else None
    return tensors if tensors is not None and digest_of(tensors) == digest else None
