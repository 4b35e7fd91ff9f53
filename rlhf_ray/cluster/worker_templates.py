"""Processes from which the workers of a local cluster are forked, so that each library is imported once, not once a
worker.

Imports are four fifths of a worker's start on CPUs: with two cores, seven workers that each import torch, transformers
and vLLM or DeepSpeed keep both busy for most of the time until the first token. A forked worker also shares the memory
of what was imported. Workers with the same environment and libraries share a template, which is started with the first
of them and ends with the session. On a cluster that was joined, and on GPUs, each worker imports for itself: nodes have
a core or more for each worker there, and what a library keeps of a device does not survive a fork.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from rlhf_ray.cluster import forked_worker, worker_template

LATE = frozenset({"TMPDIR", "RAY_PROFILING"})
"""Variables that nothing reads while it is imported: workers with different values share a template."""
LIBRARIES = ("torch", "deepspeed", "transformers.models.auto.modeling_auto", "transformers.generation.utils",
             "transformers.tokenization_utils_tokenizers", "rlhf_ray.roles.policy_learner")
"""What most roles import, which is most of the time of their start."""
VLLM_LIBRARIES = ("torch", "transformers.models.auto.modeling_auto", "vllm.engine.arg_utils",
                  "vllm.model_executor.models.llama", "vllm.v1.worker.cpu_worker", "rlhf_ray.roles.generator")
"""What generators import; not vLLM's engine, which imports Ray."""
_open: WorkerTemplates | None = None
"""Those that are open in this process."""


class WorkerTemplates:
    """The templates of a session, by the environment and the libraries of their workers."""

    def __init__(self, directory: Path) -> None:
        """
        Args:
            directory: for their sockets.
        """
        self._directory = directory
        self._started: dict[tuple[object, ...], tuple[Path, subprocess.Popen[bytes]]] = {}

    def command(self, environment: Mapping[str, str], libraries: Sequence[str]) -> str | None:
        """The command that starts a worker in place of `python`, from the template that is started if there is none;
        None where the path of the directory is too long for a socket's.

        Args:
            environment: variables of the workers, beside those of this process.
            libraries: modules that the template imports.
        """
        early = {name: value for name, value in environment.items() if name not in LATE}
        kind = (*sorted(early.items()), *libraries)
        if kind not in self._started:
            path = self._directory / str(len(self._started))
            try:
                self._started[kind] = path, _start(path, early, libraries)
            except OSError:
                return None
        path, _ = self._started[kind]
        return shlex.join([sys.executable, "-I", "-S", forked_worker.__file__, str(path), sys.executable])

    def workers(self) -> set[psutil.Process]:
        """What was forked from the templates and has not ended."""
        found: set[psutil.Process] = set()
        for _, process in self._started.values():
            with suppress(psutil.NoSuchProcess):
                found.update(psutil.Process(process.pid).children())
        return found

    def end(self) -> None:
        """Let the templates end; their workers do not. One that has ended by itself is a warning."""
        for path, process in self._started.values():
            assert process.stdin is not None
            if process.poll() is not None:
                printed = _log_of(path).read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
                logging.getLogger(__name__).warning(
                    "workers have imported their libraries each for itself, because the process that does so for all "
                    "ended with exit code %s: %s", process.returncode, printed[-1])
            process.kill()  # before its standard input ends, when it would remove the directory of all
            process.wait()
            process.stdin.close()


def _log_of(path: Path) -> Path:
    return path.with_suffix(".log")


def _start(path: Path, environment: Mapping[str, str], libraries: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a template whose socket is there before it is, so that requests wait for it."""
    with socket.socket(socket.AF_UNIX) as listener, _log_of(path).open("wb") as log:
        listener.bind(str(path))
        listener.listen(socket.SOMAXCONN)
        return subprocess.Popen(
            [sys.executable, worker_template.__file__, str(path.parent), str(listener.fileno()), *libraries],
            env={**os.environ, **environment}, pass_fds=[listener.fileno()], stdin=subprocess.PIPE,
            stdout=log, stderr=log, start_new_session=True)


@contextmanager
def open_templates() -> Iterator[WorkerTemplates]:
    """The templates of the enclosed work, which `template_command` finds. Inside another one, those of the outer."""
    global _open
    if _open is not None:
        yield _open
        return
    directory = Path(tempfile.mkdtemp(prefix="rlhf-ray-"))
    _open = templates = WorkerTemplates(directory)
    try:
        yield templates
    finally:
        _open = None
        templates.end()
        shutil.rmtree(directory, ignore_errors=True)


def template_command(environment: Mapping[str, str], libraries: Sequence[str]) -> str | None:
    """As `WorkerTemplates.command`; None where no templates are open."""
    return None if _open is None else _open.command(environment, libraries)
