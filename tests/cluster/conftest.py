"""Tiny models, prompt files, and one finished PPO run that several tests look at."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.records import Prompts, SampleKey, offsets_of
from rlhf_ray.roles.generator import Generator
from rlhf_ray.workers.calls import traffic
from tests.cluster.outside import interrupted, resumed_outside
from tests.cluster.processes import abandoned, descendants, shared_memory
from tests.cluster.shared_ray import after, before, own_ray, shared_ray
from tests.cluster.tiny import (
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    SMALL,
    VOCAB,
    Files,
    make_files,
    ppo_settings,
    write_prompts,
)
from tests.threads import one_torch_thread

__all__ = ["PROMPT_TOKENS", "RESPONSE_TOKENS", "SMALL", "VOCAB", "Files", "interrupted", "own_ray", "resumed_outside",
           "shared_ray", "write_prompts"]


@pytest.fixture(scope="module")
def loop():
    """An event loop that the generators of a file live in; what they are compared with is computed with one thread."""
    with one_torch_thread():
        loop = asyncio.new_event_loop()
        yield loop
        loop.close()


os.environ.setdefault("RAY_worker_niceness", "0")
"""Ray's workers yield to other processes by default; these tests run beside others that would starve them."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """See `shared_ray.before`."""
    before(item)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """See `shared_ray.after`."""
    after(nextitem)


@dataclass
class FinishedRun:
    """One run, and what was true of the process around it."""

    directory: Path
    config: PPOConfig
    summary: dict[str, Any]
    output: str
    """What it printed."""
    received: int
    """Bytes that the driver received from workers during the run, model loading and evaluation included."""
    children: list[str]
    """Command lines of processes of ours that were still there after the run."""
    segments: set[str]
    """Shared-memory segments that the run left and nobody uses."""
    finals: dict[str, list[Any]] = field(default_factory=dict)
    """What generators and policy said of themselves after the last step (see `look_at_the_end`)."""


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> Files:
    """Models and prompts, made once."""
    return make_files(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def configure(files, shared_ray):
    """configure(directory, **sections) -> configuration file of a tiny run with these sections changed; None leaves a
    section out."""

    def write(directory: Path, **sections: dict[str, Any] | None) -> Path:
        settings = ppo_settings(files, directory)
        for name, section in sections.items():
            settings[name] = {**settings.get(name, {}), **section} if section is not None else None
        path = directory.parent / f"{directory.name}.yaml"
        given = {name: section for name, section in settings.items() if section is not None}
        path.write_text(yaml.safe_dump(given))
        return path

    return write


@pytest.fixture(scope="session")
def finished(configure, tmp_path_factory) -> FinishedRun:
    """One whole run inside this process."""
    from rlhf_ray.stages import ppo

    directory = tmp_path_factory.mktemp("finished") / "run"
    config = load(PPOConfig, configure(directory), [])
    segments, received, output = shared_memory(), traffic.received, io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output):
        finals = look_at_the_end(patch)
        summary = ppo.run(config)
    return FinishedRun(directory, config, summary, output.getvalue(), traffic.received - received, descendants(),
                       abandoned(segments), finals)


def look_at_the_end(patch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Ask every generator, after the run's last step, for its version, its number of tokens made, and some samples."""
    from rlhf_ray.coordinator.loop import Coordinator

    prompts = Prompts(offsets_of([3]), np.array([5, 6, 7], np.int32), [""], [{}], np.arange(1))
    keys = [SampleKey(9, 0, sample) for sample in range(4)]

    found: dict[str, list[Any]] = {}
    run = Coordinator.run

    async def run_and_look(self: Coordinator) -> None:
        await run(self)
        for method in (Generator.version, Generator.tokens_made):
            found[method.__name__] = await self.roles.generators.values(method)
        found["generate"] = await self.roles.generators.values(Generator.generate, prompts, keys, 1)

    patch.setattr(Coordinator, "run", run_and_look)
    return found


@pytest.fixture
def copy_of_the_run(finished, tmp_path):
    """A copy of the finished run's directory, under its own name."""
    return shutil.copytree(finished.directory, tmp_path / "copy")
