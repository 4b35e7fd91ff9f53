"""A remote copy of a run's files at any URL that fsspec supports (s3://, gs://, file://, ...).

The manifest of a checkpoint is copied last, after every byte of its files was read back and compared with the
manifest. So a directory without a manifest is not a checkpoint but an interrupted upload.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from rlhf_ray.checkpoint.atomic_directory import replace_directory, temporary_for
from rlhf_ray.checkpoint.manifest import MANIFEST_NAME, FileRecord, read_manifest, verify_manifest
from rlhf_ray.errors import CheckpointError, ConfigError, UploadError, first_line
from rlhf_ray.files.fsync import fsync_tree
from rlhf_ray.observability.owner_record import ProcessIdentity, Term, renaming

CHECKPOINTS = "checkpoints"
WRITER = ".writer.json"
"""File that names the driver whose copies the URL holds."""
BLOCK = 8 * 2**20
"""Bytes read at once when a file is read back."""
PARALLEL_COPIES = 4
"""Files copied at the same time."""
_FILE = re.compile(rf"{CHECKPOINTS}/step_(\d+)/")
_MANIFEST = re.compile(rf"{_FILE.pattern}{MANIFEST_NAME}")


class RemoteDirectory:
    """Files below one URL. Credentials come from the environment; the URL never contains any."""

    def __init__(self, url: str, moved: Callable[[], None] = lambda: None, term: Term | None = None) -> None:
        """
        Args:
            moved: called after every piece that was copied.
            term: of the owner of the run's directory. Once it is over, every write, remote or local, raises
                SupersededError.

        Raises:
            ConfigError: the URL holds a password, is of an unknown kind, or needs a library that is not installed.
        """
        require_no_password(url)
        import fsspec

        options = {"auto_mkdir": True} if "://" not in url or url.startswith(("file:", "local:")) else {}
        try:
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"run.upload={url!r} cannot be used: {first_line(error)}. Give a URL such as "
                              "s3://bucket/runs/mine, or a mounted directory") from error
        self.url, self._root, self._moved = url.rstrip("/"), root.rstrip("/"), moved
        self._term = term
        self._writer = json.dumps({"driver": str(ProcessIdentity.own()), "id": uuid.uuid4().hex}).encode()

    def claim(self, resume: bool) -> None:
        """Check that the URL can be written and holds no other run, and take it over from its present writer.

        Raises:
            ConfigError: it cannot be written; or it holds checkpoints and the run does not resume.
        """
        try:
            steps = self.steps()
            if resume or not steps:
                self._fs.pipe_file(self._at(WRITER), self._writer)
        except Exception as error:  # each fsspec library raises errors of its own
            raise ConfigError(
                f"run.upload={self.url!r} cannot be written: {type(error).__name__}: {first_line(error)}; create "
                "the bucket or directory, and check the credentials") from error
        if steps and not resume:
            raise ConfigError(f"run.upload={self.url!r} already holds a run, whose newest checkpoint is of step "
                              f"{steps[0]}: pass --resume to continue it, or give another URL")

    def check_claim(self) -> None:
        """Check that no other driver has taken the URL over. What is being copied then is copied to its end.

        Raises:
            SupersededError: another driver owns the run's directory.
            UploadError: another run has the URL; what is copied now would mix with its files.
        """
        self._check()
        writer = self.read(WRITER)
        if writer not in (None, self._writer):
            try:
                driver = json.loads(writer)["driver"]
            except (ValueError, TypeError, KeyError):  # cut short, or of another program
                driver = "another driver"
            raise UploadError(f"run.upload={self.url!r} was taken over by {driver}, so this run is copied there no "
                              "longer; two runs need two URLs")

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, newest first."""
        matches = (_MANIFEST.fullmatch(name) for name in self.names(CHECKPOINTS))
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def begun_steps(self) -> set[int]:
        """Steps of all checkpoints of which a file is there, complete or not."""
        matches = (_FILE.match(name) for name in self.names(CHECKPOINTS))
        return {int(match[1]) for match in matches if match}

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None if it is not there."""
        return bytes(self._fs.cat_file(self._at(name))) if name in self.names(name) else None

    def names(self, below: str = "") -> list[str]:
        """Names of all files below a remote directory."""
        self._fs.invalidate_cache()
        try:
            paths = self._fs.find(self._at(below) if below else self._root)
        except FileNotFoundError:
            return []
        return [path[len(self._root):].lstrip("/") for path in paths]

    def holds_checkpoint(self, path: Path) -> bool:
        """Whether the checkpoint at the local `path` has a complete remote copy."""
        return self.read(f"{CHECKPOINTS}/{path.name}/{MANIFEST_NAME}") == (path / MANIFEST_NAME).read_bytes()

    def put(self, file: Path, name: str) -> None:
        """Upload a file, replacing one of the same name."""
        self._check()
        self._fs.put_file(str(file), self._at(name), callback=self._callback())
        self._moved()

    def get(self, name: str, file: Path) -> None:
        """Download a file; it gets its name when it is complete."""
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.partial")
        try:
            self._fs.get_file(self._at(name), str(partial), callback=self._callback())
            with renaming(self._term):
                partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
        self._moved()

    def read_back(self, name: str) -> FileRecord:
        """Size and SHA-256 of a remote file, read back."""
        digest, size = hashlib.sha256(), 0
        with self._fs.open(self._at(name), "rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
                size += len(block)
                self._moved()
        return FileRecord(size, digest.hexdigest())

    def remove(self, name: str) -> None:
        """Remove a remote directory, its manifest first, so that it never looks complete; or a file, if it is there."""
        names = sorted(self.names(name), key=lambda file: PurePosixPath(file).name != MANIFEST_NAME)
        for file in names:
            self._check()
            self._fs.rm_file(self._at(file))

    def put_checkpoint(self, path: Path) -> None:
        """Upload a local checkpoint, and read back every byte of it.

        Raises:
            CheckpointError: the uploaded bytes differ from the manifest.
            FileNotFoundError: the local checkpoint was removed meanwhile.
        """
        manifest, place = read_manifest(path), f"{CHECKPOINTS}/{path.name}"
        self.remove(place)

        def send(name: str) -> str | None:
            self.put(path / name, f"{place}/{name}")
            return None if self.read_back(f"{place}/{name}") == manifest.files[name] else name

        with ThreadPoolExecutor(PARALLEL_COPIES) as pool:
            wrong = [name for name in pool.map(send, manifest.files) if name]
        if wrong:
            raise CheckpointError(f"{self.url}/{place}: {', '.join(wrong[:5])} differ from the local files after the "
                                  "upload; it is tried again with the next one")
        self.put(path / MANIFEST_NAME, f"{place}/{MANIFEST_NAME}")

    def get_checkpoint(self, step: int, root: Path, verified: bool = False) -> None:
        """Download the checkpoint of `step` into `root`, the directory of local ones. It gets its name when it is
        complete, since a partial copy would look like the newest checkpoint, and never be fetched again.

        Args:
            verified: compare its bytes with the manifest before it replaces another one; otherwise that happens when
                it is loaded.

        Raises:
            CheckpointError: they differ.
        """
        final = root / f"step_{step}"
        partial, place = temporary_for(final, self._term), f"{CHECKPOINTS}/{final.name}"
        try:
            self.get_all(self.names(place), partial, below=f"{place}/")
            if verified:
                verify_manifest(partial)
            fsync_tree(partial)
            replace_directory(partial, final, self._term)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def get_all(self, names: Iterable[str], root: Path, below: str = "") -> None:
        """Download files to the same names below `root`, without the prefix `below`.

        Raises:
            CheckpointError: a name leads out of `root`.
        """
        names = list(names)
        if strange := [name for name in names if ".." in PurePosixPath(name).parts or name.startswith("/")]:
            raise CheckpointError(f"{self.url} has a file {strange[0]!r}, which leads out of the run's directory; "
                                  "remove it")
        with ThreadPoolExecutor(PARALLEL_COPIES) as pool:
            list(pool.map(lambda name: self.get(name, root / name.removeprefix(below)), names))

    def _check(self) -> None:
        if self._term is not None:
            self._term.check()

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _callback(self) -> Any:
        from fsspec.callbacks import Callback

        return Callback(hooks={"moved": lambda *_, **__: self._moved()})


def require_no_password(url: str) -> None:
    """Check that a URL contains no password.

    Raises:
        ConfigError: it contains one; the message does not repeat it.
    """
    if urlsplit(url).password:
        raise ConfigError("run.upload contains a password, which would be saved with the run's configuration: remove "
                          "it, and put the credentials into the environment (AWS_PROFILE, "
                          "GOOGLE_APPLICATION_CREDENTIALS, ...)")


def silence_cloud_libraries() -> None:
    """Hide log messages of the cloud libraries below ERROR, which include every request."""
    for name in ("botocore", "aiobotocore", "s3fs", "gcsfs"):
        logging.getLogger(name).setLevel(logging.ERROR)
