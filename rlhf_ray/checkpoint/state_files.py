"""Saved state: small state as JSON, records as .npz, torch's files. Reading any of them runs no code.

JSON holds the coordinator's state: step, version, cursor, controllers, random states, the buffer's metadata. Arrays,
NumPy scalars, bytes and tuples are tagged objects in it, and are restored with their types.
"""

from __future__ import annotations

import base64
import json
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rlhf_ray.errors import CheckpointError
from rlhf_ray.records import Ragged, SampleKey, SampleRows

R = TypeVar("R", bound=Ragged)
_ARRAY, _BYTES, _TUPLE = "__array__", "__bytes__", "__tuple__"
_HEADER = "__record__"


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write `state` as JSON: dicts with text keys, lists, tuples, numbers, text, None, bytes, arrays without objects.

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


def save_records(path: Path, record: Ragged) -> None:
    """Write a ragged record as an uncompressed .npz: arrays as they are, keys as [N, 3] int64, other lists as JSON.

    Raises:
        CheckpointError: a column is neither an array without objects nor a list that JSON can hold.
    """
    arrays: dict[str, np.ndarray] = {"offsets": record.offsets}
    header: dict[str, Any] = {"type": type(record).__name__, "absent": [], "keys": [], "lists": {}}
    for f in fields(record):
        value = getattr(record, f.name)
        if value is None:
            header["absent"].append(f.name)
        elif isinstance(value, np.ndarray):
            arrays[f.name] = value
        elif value and all(isinstance(item, SampleKey) for item in value):
            header["keys"].append(f.name)
            arrays[f.name] = np.array([key.numbers for key in value], dtype=np.int64).reshape(-1, 3)
        else:
            header["lists"][f.name] = _to_json(value, f"{type(record).__name__}.{f.name}")
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise CheckpointError(f"{type(record).__name__}.{name} holds Python objects (dtype {array.dtype})")
    arrays[_HEADER] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    with Path(path).open("wb") as file:  # NumPy appends .npz to a path without it
        np.savez(file, allow_pickle=False, **arrays)


def load_records(path: Path, kind: type[R]) -> R:
    """The record of type `kind` that `save_records` wrote; columns have the same dtype and bytes.

    Raises:
        CheckpointError: missing, damaged, of another type, or with columns that do not fit its offsets.
    """
    try:
        with np.load(path, allow_pickle=False) as data:
            header = json.loads(data[_HEADER].tobytes())
            columns: dict[str, Any] = {name: data[name] for name in data.files if name != _HEADER}
        held = header["type"]
    except Exception as error:  # on damaged files zipfile, zlib, struct and NumPy raise various errors
        raise CheckpointError(f"{path} cannot be read as saved records: {error!r}") from error
    if held != kind.__name__:
        raise CheckpointError(f"{path} holds {held} records instead of {kind.__name__}")
    try:
        columns.update({name: [SampleKey(*map(int, k)) for k in columns[name]] for name in header["keys"]})
        columns.update({name: _from_json(value) for name, value in header["lists"].items()})
        columns.update(dict.fromkeys(header["absent"]))
        record = kind(**columns)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} does not have the columns of {kind.__name__}: {error}") from error
    _check_lengths(path, record)
    return record


def _check_lengths(path: Path, record: Ragged) -> None:
    offsets = record.offsets
    if offsets.ndim != 1 or offsets.dtype.kind != "i" or not len(offsets) or offsets[0] or (np.diff(offsets) < 0).any():
        raise CheckpointError(f"{path} is damaged: its offsets are not row boundaries")
    expected = {"token": int(record.offsets[-1]), "row": len(record)}
    if isinstance(record, SampleRows):
        masks = 0 if record.mask_sizes is None else int(np.abs(record.mask_sizes).sum())
        expected |= {"sample": record.sample_count, "mask": masks}
    for f in fields(record):
        value, axis = getattr(record, f.name), f.metadata.get("axis")
        if axis and value is not None and len(value) != expected[axis]:
            raise CheckpointError(
                f"{path}: column {f.name} has {len(value)} entries instead of one per {axis}, {expected[axis]}"
            )


def _to_json(value: Any, place: str) -> Any:
    """`value` in plain JSON types; `place` is its name in errors."""
    if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
        return value
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        kind = {"dtype": value.dtype.str, "shape": list(value.shape), "scalar": isinstance(value, np.generic)}
        return {_ARRAY: data, **kind}
    if isinstance(value, tuple):
        return {_TUPLE: [_to_json(item, f"{place}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [_to_json(item, f"{place}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key in (_ARRAY, _BYTES, _TUPLE):
                raise CheckpointError(f"cannot save {place}: key {key!r} is not text, or is reserved for tagged values")
        return {key: _to_json(item, f"{place}[{key!r}]") for key, item in value.items()}
    raise CheckpointError(
        f"cannot save {place}: {type(value).__name__} is not a number, text, None, bytes, list, tuple, dict or array"
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _BYTES in value:
        return base64.b64decode(value[_BYTES], validate=True)
    if _TUPLE in value:
        return tuple(_from_json(item) for item in value[_TUPLE])
    if _ARRAY in value:
        flat = np.frombuffer(base64.b64decode(value[_ARRAY], validate=True), dtype=np.dtype(value["dtype"]))
        array = flat.reshape(value["shape"]).copy()
        return array[()] if value["scalar"] else array
    return {key: _from_json(item) for key, item in value.items()}


def load_tensors(path: Path | str) -> Any:
    """Read a file written by `torch.save` without running what is in it.

    A pickle may call any function. Here only tensors and plain containers are rebuilt; a file that contains
    anything else is refused before any of it has run.

    Raises:
        CheckpointError: the file is missing or damaged, or contains other objects or calls.
    """
    import torch

    try:
        return torch.load(path, weights_only=True)
    except pickle.UnpicklingError as error:
        match = re.search(r"GLOBAL (\S+)", str(error))
        raise CheckpointError(f"{path} was not read: it contains {match[1] if match else 'objects'}, which no "
                              "checkpoint of this package does. Use another checkpoint, and find out who wrote "
                              "this one.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # torch raises various errors on damaged files
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
