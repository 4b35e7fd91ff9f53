"""The manifest of a checkpoint: size and SHA-256 of every file. Written last, verified before anything is loaded.

A manifest guards against damage (a full disk, a lost block, a half copied directory), not against an attacker, who
could write another one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath

from rlhf_ray.checkpoint.atomic_directory import files_under
from rlhf_ray.errors import CheckpointError
from rlhf_ray.files.fsync import fsync_path, moved, operation, progress, work_for

SCHEMA = 1
MANIFEST_NAME = "manifest.json"
_PICKLES = {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt"}
_HASH_THREADS = 4
_PIECE = 2**20
"""Bytes read at a time."""


class NewerSchemaError(CheckpointError):
    """A checkpoint written by a later version of this package. It is not damaged: update the package."""


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint."""

    size: int
    """Bytes."""
    sha256: str
    """Hex digest of the content."""


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint."""

    step: int
    created: str
    """UTC, ISO 8601."""
    package_version: str
    files: Mapping[str, FileRecord]
    """By path relative to the checkpoint, with forward slashes."""
    term: int | None = None
    """In which term of the run's directory it was written (`observability.owner_record`); None if no driver owned the
    directory."""
    schema: int = SCHEMA


def write_manifest(directory: Path, step: int, term: int | None = None) -> Manifest:
    """Hash every file below `directory` and write its manifest, flushed to disk.

    Raises:
        CheckpointError: the directory contains a symbolic link or special file.
    """
    paths = [path for path in files_under(directory) if path != directory / MANIFEST_NAME]
    for path in paths:
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{path} is not a regular file, and a checkpoint holds only these; remove it")
    records = dict(zip((_relative(path, directory) for path in paths), _hash_all(paths), strict=True))
    created = datetime.now(UTC).isoformat(timespec="seconds")
    manifest = Manifest(step, created, _package_version(), records, term)
    (directory / MANIFEST_NAME).write_bytes(_encode(manifest))
    fsync_path(directory / MANIFEST_NAME)
    return manifest


def read_manifest(directory: Path) -> Manifest:
    """The manifest itself, checked for damage; the files it lists are not read.

    Raises:
        NewerSchemaError: written by a later version of this package.
        CheckpointError: missing or damaged.
    """
    path = directory / MANIFEST_NAME
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); the checkpoint is incomplete") from error
    try:
        body = json.loads(raw)["manifest"]
        schema = int(body["schema"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: not a manifest ({error!r})") from error
    if schema > SCHEMA:
        raise NewerSchemaError(
            f"{path} has schema {schema}, this package ({_package_version()}) reads up to {SCHEMA}; "
            f"it was written by version {body.get('package_version')}: update the package"
        )
    try:
        files = {name: FileRecord(**record) for name, record in body["files"].items()}
        manifest = Manifest(**{**body, "files": files})
        intact = _encode(manifest) == raw
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: unexpected content ({error!r})") from error
    if not intact:
        raise CheckpointError(f"{path} is damaged: its content does not match its own digest")
    return manifest


def verify_manifest(directory: Path) -> Manifest:
    """Check every byte of a checkpoint against its manifest.

    Hidden files (".nfs0001", ".DS_Store") that are never loaded are ignored; any other unlisted file is refused, since
    a loader that searches by pattern could find and unpickle it.

    Raises:
        CheckpointError: files are missing, truncated, different or not listed; names them.
    """
    manifest = read_manifest(directory)
    problems = _wrong_sizes(directory, manifest) + _unlisted(directory, manifest)
    if not problems:
        problems = _wrong_digests(directory, manifest)
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(f"checkpoint {directory} is damaged: {'; '.join(problems[:5])}{more}")
    return manifest


def _wrong_sizes(directory: Path, manifest: Manifest) -> list[str]:
    problems = []
    for name, record in manifest.files.items():
        path = directory / name
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            problems.append(f"{name} points outside the checkpoint")
        elif path.is_symlink() or (path.exists() and not path.is_file()):
            problems.append(f"{name} is not a regular file")
        elif not path.exists():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != record.size:
            change = "truncated" if path.stat().st_size < record.size else "longer than written"
            problems.append(f"{name} is {change}: {path.stat().st_size} bytes instead of {record.size}")
    return problems


def _unlisted(directory: Path, manifest: Manifest) -> list[str]:
    names = [_relative(path, directory) for path in files_under(directory)]
    extra = [name for name in names if name not in manifest.files and name != MANIFEST_NAME]
    harmless = {name for name in extra if Path(name).name.startswith(".") and Path(name).suffix not in _PICKLES}
    return [f"{name} is not listed in the manifest; remove it" for name in extra if name not in harmless]


def _wrong_digests(directory: Path, manifest: Manifest) -> list[str]:
    records = _hash_all([directory / name for name in manifest.files])
    return [
        f"{name} has changed: SHA-256 {actual.sha256[:12]}... instead of {record.sha256[:12]}..."
        for (name, record), actual in zip(manifest.files.items(), records, strict=True)
        if actual.sha256 != record.sha256
    ]


def _hash_all(paths: list[Path]) -> list[FileRecord]:
    """Hash files in threads (hashing releases the interpreter's lock)."""
    threads = min(_HASH_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, initializer=work_for, initargs=(progress(),)) as pool:
        return list(pool.map(_hash, paths))


def _hash(path: Path) -> FileRecord:
    digest, piece = hashlib.sha256(), memoryview(bytearray(_PIECE))
    try:
        with operation("hash", path), path.open("rb", buffering=0) as file:
            while count := file.readinto(piece):
                digest.update(piece[:count])
                moved()
            return FileRecord(file.tell(), digest.hexdigest())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _encode(manifest: Manifest) -> bytes:
    """The exact bytes of a manifest file. Reading encodes again and compares, so that any changed byte is noticed."""
    body = asdict(manifest)
    canonical = json.dumps(body, sort_keys=True, allow_nan=False)
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    return json.dumps({"manifest": body, "sha256": digest}, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def _relative(path: Path, directory: Path) -> str:
    return path.relative_to(directory).as_posix()


def _package_version() -> str:
    try:
        return version("rlhf-ray")
    except PackageNotFoundError:
        return "unknown"
