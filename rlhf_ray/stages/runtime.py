"""What every stage stands on: pools on a cluster, workers in them, and a clean floor when the stage is over."""

import asyncio
import json
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from rlhf_ray.checkpoint.atomic import clear_leftovers
from rlhf_ray.checkpoint.directory import Checkpoint, CheckpointStore
from rlhf_ray.checkpoint.uploader import Uploader, bring_back
from rlhf_ray.cluster.group import WorkerGroup
from rlhf_ray.cluster.pools import Pools
from rlhf_ray.cluster.session import Session, ray_session
from rlhf_ray.cluster.shared_files import require_shared_files
from rlhf_ray.config.load import as_yaml
from rlhf_ray.config.run import PlacementConfig
from rlhf_ray.config.stages import StageConfig
from rlhf_ray.engine.distributed import accelerator_environment
from rlhf_ray.errors import DiskStalled, RLHFError, StoppedEarly, SupersededError, UploadError
from rlhf_ray.files.thread import HURRY_S, FileThread, RunFiles
from rlhf_ray.observability.ownership import Ownership
from rlhf_ray.observability.report import write_report
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.observability.sinks import require_trackers

T = TypeVar("T")
SHUTDOWN_GRACE_S, FAILURE_SHUTDOWN_GRACE_S = 10.0, 3.0
"""How long workers get to leave by themselves: after a stage that ended well, and after one that failed (some of them
may still be loading then, and hear nothing)."""


class Runtime:
    """Spawns the workers of a stage and remembers them."""

    def __init__(self, config: StageConfig, pools: Pools, scratch: Mapping[str, str] | None = None) -> None:
        """
        Args:
            scratch: see the attribute of that name.
        """
        self._config, self._pools = config, pools
        self.scratch = scratch or {}
        """Variables of the environment by which a worker's temporary files come to lie where the stage removes them."""
        self._groups: list[tuple[WorkerGroup, str | None]] = []

    def spawn(
        self, role: str, cls: type, placement: PlacementConfig, arguments: Callable[[int], Mapping[str, Any]],
        environment: Mapping[str, str] | None = None, shutdown_method: str | None = None,
    ) -> WorkerGroup:
        """Workers of one role. `shutdown_method` is the method that lets them end in good order."""
        group = WorkerGroup(role, cls, placement, self._pools, arguments,
                            {**accelerator_environment(placement.gpus), **self._recording(), **(environment or {})},
                            self._config.cluster.call_timeout_s, self._config.logging.task_events,
                            self._section(placement))
        self._groups.append((group, shutdown_method))
        return group

    def _recording(self) -> Mapping[str, str]:
        """What makes Ray's record of calls complete: without it its timeline has no times."""
        return {"RAY_PROFILING": "1"} if self._config.logging.task_events else {}

    def _section(self, placement: PlacementConfig) -> str:
        """The section of the configuration that a placement is; none for roles that have none."""
        return next((name for name, known in self._config.placements().items() if known is placement), "")

    async def give_up_on(self, grace_s: float) -> None:
        """End all workers: politely where that is possible in time, then for certain."""
        stopping = [group.values(method) for group, method in self._groups if method]
        try:
            with suppress(TimeoutError, RLHFError):
                async with asyncio.timeout(grace_s):
                    await asyncio.gather(*stopping, return_exceptions=True)
        finally:  # also when a person is in a hurry and cancels the farewell
            for group, _ in self._groups:
                group.kill()
            self._groups.clear()


@asynccontextmanager
async def open_runtime(config: StageConfig, say: Callable[[str], None] | None = None) -> AsyncIterator[Runtime]:
    """The stage's pools, opened with a deadline; workers and pools are gone afterwards whatever happens.

    Args:
        say: told what is waited for, should the pools take long.
    """
    pools = Pools(config.pools, config.placements(), config.cluster)
    await pools.open(config.cluster.start_timeout_s, say)
    grace_s = FAILURE_SHUTDOWN_GRACE_S
    with scratch(config) as variables:
        runtime = Runtime(config, pools, variables)
        try:
            await require_shared_files(config, pools)
            yield runtime
            grace_s = SHUTDOWN_GRACE_S
        finally:
            try:
                await runtime.give_up_on(grace_s)
            finally:
                pools.close()


@contextmanager
def scratch(config: StageConfig) -> Iterator[dict[str, str]]:
    """A directory for temporary files of workers, which those that are killed cannot remove themselves; yields the
    variables that lead there. Nodes of a cluster that was joined have temporary places of their own: none then."""
    if config.cluster.address is not None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="rlhf-ray-", ignore_cleanup_errors=True) as directory:
        yield {"TMPDIR": directory}


async def start_learners(group: WorkerGroup, timeout_s: float) -> list[Any]:
    """Let the ranks of a learner meet and build their engines, within `timeout_s`."""
    host = await group.call(0, "node_host", timeout_s=timeout_s).value()
    address = await group.call(0, "rendezvous", host, timeout_s=timeout_s).value()
    return await group.start(address, group.call_timeout_s, timeout_s=timeout_s)


def sizes_note(role: str, started: Mapping[str, float]) -> str:
    """What a learner's `start` says of its size, in a sentence."""
    trained, parameters = started["trained"], started["parameters"]
    share = "" if trained == parameters else f" of {parameters:,.0f} ({trained / parameters:.2%})"
    return f"{role} trains {trained:,.0f}{share} parameters"


@contextmanager
def owned_directory(config: StageConfig, resume: bool) -> Iterator[RunDirectory]:
    """The run's directory, which this process owns meanwhile, without what others had begun to write there.

    Raises:
        ConfigError: `logging` asks for a package that is not installed; the directory cannot be used, holds another
            run, or another driver owns it.
    """
    require_trackers(config.logging)
    files = RunFiles(config.cluster.disk_timeout_s)
    with closing(files), ExitStack() as stack:
        directory = files.records.do(RunDirectory.create, config.run.dir, resume)
        directory.files = files
        files.records.do(stack.enter_context, directory.owned())
        files.records.do(clear_leftovers, directory.path, r"[a-z_]+", directory.term)
        files.records.do(CheckpointStore(directory.checkpoints, keep=1, term=directory.term).clean)
        yield directory


def probe_note(role: str, started: Mapping[str, float]) -> str:
    """What a worker's `start` says of its comparison with transformers, in a sentence."""
    return (f"{role}: packed rows give what transformers gives, to {started['probe_difference']:.2g}; compared in "
            f"{started['probe_seconds']:.1f} s")


def run_stage(
    config: StageConfig, directory: RunDirectory, resume: bool,
    main: Callable[[Session], Coroutine[Any, Any, dict[str, Any]]],
) -> dict[str, Any]:
    """Run a stage's coroutine in its run directory and on its cluster, then write summary and report.

    Returns:
        The summary.

    Raises:
        SupersededError: another driver has taken the directory over; nothing was written there since.
        StoppedEarly: the run ended itself before its last step; summary and report are written then, too.
        DiskStalled: the disk of the run hangs.
    """
    files = directory.files
    with uploading(config, directory, resume):
        files.records.do(directory.write_text, directory.config.name, as_yaml(config))
        metadata = {"directory": str(directory.path.resolve()), "steps": str(config.run.steps),
                    "stage": type(config).__name__.removesuffix("Config")}
        try:
            with ray_session(config.cluster, config.pools, directory.path.name, metadata) as session:
                summary = run_async(while_owned(directory.ownership, main(session)))
        finally:  # workers may write to a checkpoint that was given up until they are gone
            with suppress(OSError, DiskStalled, SupersededError):
                files.checkpoints.do(CheckpointStore(directory.checkpoints, keep=1, term=directory.term).clean)
        files.records.do(directory.write_json, "summary.json", summary)
        if directory.metrics.is_file():
            files.records.do(partial(write_report, directory.path, term=directory.term))
    if "stopped_early" in summary:
        raise StoppedEarly(f"stopped early after step {summary['steps']} of {config.run.steps}: "
                           f"{summary['stopped_early']}. Checkpoint, model and report are in {directory.path}; with "
                           "another limit --resume goes on")
    return summary


def fetch_uploaded(config: StageConfig, directory: RunDirectory) -> None:
    """Before a resume: bring back from `run.upload` a run that is further there than here.

    Raises:
        ConfigError: the place cannot be used.
    """
    if config.run.upload:
        bring_back(config.run.upload, directory.path, logging.getLogger(__name__).warning, directory.term)


def newest_checkpoint(store: CheckpointStore, resume: bool, directory: RunDirectory) -> Checkpoint | None:
    """What a resumed run goes on from, noted in the owner's record; None for a new run. Errors as in
    `CheckpointStore.latest`."""
    start = store.latest() if resume else None
    if directory.ownership is not None:
        directory.ownership.go_on_from(start.step if start else None)
    return start


@contextmanager
def uploading(config: StageConfig, directory: RunDirectory, resume: bool) -> Iterator[None]:
    """Copy what the enclosed run writes to `run.upload` meanwhile, and all of it at the end, however it ends.

    Raises:
        ConfigError: the place cannot be used.
        UploadError: the run ended well, and its last files are not there.
    """
    if not config.run.upload:
        yield
        return
    uploader = Uploader(config.run.upload, directory.path, config.cluster.call_timeout_s, term=directory.term)
    uploader.start(resume)
    try:
        yield
    except DiskStalled:
        raise  # what cannot be written cannot be read, either
    except BaseException:
        with suppress(UploadError, SupersededError):  # said already; why the run ended is more to the point
            uploader.finish()
        raise
    try:
        uploader.finish()
    except UploadError as error:
        summary = json.loads(directory.summary.read_text())
        directory.write_json(directory.summary.name, {**summary, "upload_failed": str(error)})
        raise


async def while_owned(ownership: Ownership | None, main: Coroutine[Any, Any, T]) -> T:
    """The result of `main`, which is cancelled when another driver takes over the run's directory.

    Raises:
        SupersededError: one did.
    """
    if ownership is None:
        return await main
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def end() -> None:
        if task is not None:
            loop.call_soon_threadsafe(task.cancel)

    ownership.when_lost(end)
    try:
        return await main
    except BaseException:
        if ownership.lost is not None:  # whatever else went wrong: the run is not this driver's to go on with
            raise ownership.lost from None
        check = FileThread("owner record", HURRY_S)
        with suppress(OSError, DiskStalled), closing(check):
            check.do(ownership.term.check)
        raise
    finally:
        ownership.when_lost(lambda: None)


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; one that was cancelled counts as interrupted by a person."""
    try:
        return asyncio.run(main)
    except asyncio.CancelledError as error:
        raise KeyboardInterrupt from error
