"""Writes rows and functions that were given as Python objects into `inputs/` of the run's directory, so that the run
reads files, as every other run does.

A file's name has the beginning of its digest, so no file of an earlier call is changed. A function's file is its
source: nothing is ever unpickled. `inputs.json` has the whole digests.
"""

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from rlhf_ray.config.fields import strings_of
from rlhf_ray.config.given_objects import GivenFunction, GivenRows, digest
from rlhf_ray.config.stages import StageConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.files.writing import write_atomically
from rlhf_ray.observability.run_directory import RunDirectory, read_json

C = TypeVar("C", bound=StageConfig)
FOLDER = "inputs"
RECORD = f"{FOLDER}/inputs.json"
DIGEST_CHARACTERS = 12


def with_inputs(config: C, resume: bool) -> C:
    """The configuration with paths of files in place of objects.

    Raises:
        ConfigError: the run's directory cannot be used; or the run that is resumed was given objects, and this
            configuration has only their files.
    """
    given = [(field, value) for field, value in strings_of(config) if isinstance(value, GivenRows | GivenFunction)]
    if not given:
        if resume:
            _refuse_other_call(config)
        return config
    directory = RunDirectory.create(config.run.dir, resume)
    (directory.path / FOLDER).mkdir(exist_ok=True)
    former = {each["field"]: each["sha256"] for each in read_json(directory.path / RECORD).get("inputs", [])}
    record = []
    for field, value in given:
        path = _path(directory, field, value)
        if not path.is_file():
            write_atomically(path, value.text.encode())
        record.append({"field": field, "given": str(value), "file": path.name, "sha256": digest(value)})
        _tell_of_change(field, value, former.get(field) if resume else None)
    directory.write_json(RECORD, {"inputs": record})
    resolved: C = _resolved(config, directory, "")
    return resolved


def _resolved(value: Any, directory: RunDirectory, field: str) -> Any:
    """`value` with the path of each object within it."""
    if isinstance(value, GivenRows):
        return str(_path(directory, field, value))
    if isinstance(value, GivenFunction):
        return f"{_path(directory, field, value)}:{value.function_name}"
    if isinstance(value, BaseModel):
        parts = {name: getattr(value, name) for name in type(value).model_fields}
        return value.model_copy(update=dict(_changed(parts, directory, field)))
    if isinstance(value, dict):
        return {**value, **dict(_changed(value, directory, field))}
    if isinstance(value, list) and any(isinstance(each, BaseModel) for each in value):
        return [_resolved(each, directory, field) for each in value]
    return value


def _changed(parts: dict[str, Any], directory: RunDirectory, field: str) -> Iterator[tuple[str, Any]]:
    for name, part in parts.items():
        resolved = _resolved(part, directory, f"{field}.{name}".lstrip("."))
        if resolved is not part:
            yield name, resolved


def _path(directory: RunDirectory, field: str, value: GivenRows | GivenFunction) -> Path:
    name = re.sub(r"\W+", "_", field.removesuffix(".path").removesuffix(".function"))
    suffix = "py" if isinstance(value, GivenFunction) else "jsonl"
    return directory.path / FOLDER / f"{name[:100]}_{digest(value)[:DIGEST_CHARACTERS]}.{suffix}"


def _tell_of_change(field: str, value: GivenRows | GivenFunction, former: str | None) -> None:
    """Log that a function is another than before the resume. Rows that are others are refused when they are read."""
    if isinstance(value, GivenFunction) and former not in (None, digest(value)):
        logging.getLogger(__name__).warning(
            "%s: %s is not the one that the run had before (SHA-256 %s then, %s now); it gives the scores from here on",
            field, value, str(former)[:DIGEST_CHARACTERS], digest(value)[:DIGEST_CHARACTERS])


def _refuse_other_call(config: StageConfig) -> None:
    inputs = os.path.abspath(Path(config.run.dir) / FOLDER) + os.sep
    fields = [field for field, text in strings_of(config) if os.path.abspath(text).startswith(inputs)]
    if fields:
        raise ConfigError(
            f"the run in {config.run.dir} was given Python objects by rlhf_ray.run() ({', '.join(fields)}), and its "
            "config.yaml has only the files that were made of them; resume it by the same call, with the same objects: "
            "rlhf_ray.run(config, resume=True). To go on from files, name others than those in "
            f"{Path(config.run.dir) / FOLDER}")
