"""Saved state: small state as JSON, experience as .npz, torch's files. Reading any of them runs no code.

JSON holds the coordinator's state: step, version, cursor, controllers, the buffer's metadata. Arrays and NumPy scalars
are tagged objects in it, and are restored with their types.
"""

from __future__ import annotations

import base64
import json
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np

from rlhf_ray.errors import CheckpointError
from rlhf_ray.records import Episode, Experience, SampleKey, Turn

_ARRAY = "__array__"


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write `state` as JSON: dicts with text keys, lists, numbers, text, None, arrays without objects.

    Raises:
        CheckpointError: names the first value of another type, by its place in `state`.
    """
    Path(path).write_bytes(encoded_state(state))


def encoded_state(state: dict[str, Any]) -> bytes:
    """The bytes that `save_state` writes; errors as there."""
    return (json.dumps(_to_json(state, "state"), indent=1) + "\n").encode()


def load_state(path: Path) -> dict[str, Any]:
    """Read a file written by `save_state`.

    Raises:
        CheckpointError: missing or damaged.
    """
    try:
        state = _from_json(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read as saved state: {error!r}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds {type(state).__name__} instead of a dict")
    return state


def check_complete(state: Mapping[str, Any], names: Iterable[str], place: str) -> None:
    """Check that saved state has all keys that will be read.

    Args:
        names: the keys.
        place: the file of the state, for the message.

    Raises:
        CheckpointError: keys are missing; names them.
    """
    missing = sorted(set(names) - state.keys())
    if missing:
        raise CheckpointError(f"{place} lacks {', '.join(missing)}: another version of this package wrote it. Go on "
                              "with that version, or begin a new run")


def save_experience(path: Path, experience: Experience) -> None:
    """Write experience as an uncompressed .npz: the columns that it has, and its keys as [N, 3] int64."""
    columns = {f.name: column for f in fields(experience) if (column := getattr(experience, f.name)) is not None}
    columns["keys"] = np.array([key.numbers for key in experience.keys], dtype=np.int64).reshape(-1, 3)
    if experience.episodes is not None:
        columns["episodes"] = np.array(json.dumps([asdict(episode) for episode in experience.episodes]))
    with Path(path).open("wb") as file:  # NumPy appends .npz to a path without it
        np.savez(file, allow_pickle=False, **columns)


def load_experience(path: Path) -> Experience:
    """The experience that `save_experience` wrote; columns have the same dtype and bytes. The manifest of a checkpoint
    has the file's digest.

    Raises:
        CheckpointError: missing, damaged, or with other columns.
    """
    try:
        with np.load(path, allow_pickle=False) as data:
            columns: dict[str, Any] = dict.fromkeys(f.name for f in fields(Experience)) | dict(data)
        columns["keys"] = [SampleKey(*map(int, key)) for key in columns["keys"]]
        if columns["finish_reasons"] is not None:
            columns["finish_reasons"] = columns["finish_reasons"].tolist()
        if columns["episodes"] is not None:
            columns["episodes"] = [_episode(each) for each in json.loads(str(columns["episodes"]))]
        return Experience(**columns)
    except Exception as error:  # on damaged files zipfile, zlib, struct and NumPy raise various errors
        raise CheckpointError(f"{path} cannot be read as saved experience: {error!r}") from error


def _episode(columns: dict[str, Any]) -> Episode:
    return Episode(**{**columns, "turns": [Turn(**turn) for turn in columns["turns"]]})


def _to_json(value: Any, place: str) -> Any:
    """`value` in plain JSON types; `place` is its name in errors."""
    if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
        return value
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        kind = {"dtype": value.dtype.str, "shape": list(value.shape), "scalar": isinstance(value, np.generic)}
        return {_ARRAY: data, **kind}
    if isinstance(value, list):
        return [_to_json(item, f"{place}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key == _ARRAY:
                raise CheckpointError(f"cannot save {place}: key {key!r} is not text, or is reserved for tagged values")
        return {key: _to_json(item, f"{place}[{key!r}]") for key, item in value.items()}
    raise CheckpointError(
        f"cannot save {place}: {type(value).__name__} is not a number, text, None, list, dict or array"
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        flat = np.frombuffer(base64.b64decode(value[_ARRAY], validate=True), dtype=np.dtype(value["dtype"]))
        array = flat.reshape(value["shape"]).copy()
        return array[()] if value["scalar"] else array
    return {key: _from_json(item) for key, item in value.items()}


def load_tensors(path: Path | str, mapped: bool = False) -> Any:
    """Read a file written by `torch.save` without running what is in it.

    A pickle may call any function. Here only tensors and plain containers are rebuilt; a file that contains
    anything else is refused before any of it has run.

    Args:
        mapped: the tensors are pages of the file, which are read when they are used, if its format allows it.

    Raises:
        CheckpointError: the file is missing or damaged, or contains other objects or calls.
    """
    import torch

    try:
        return torch.load(path, weights_only=True, mmap=mapped and is_zipfile(path))
    except pickle.UnpicklingError as error:
        match = re.search(r"GLOBAL (\S+)", str(error))
        raise CheckpointError(f"{path} was not read: it contains {match[1] if match else 'objects'}, which no "
                              "checkpoint of this package does. Use another checkpoint, and find out who wrote "
                              "this one.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # torch raises various errors on damaged files
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
