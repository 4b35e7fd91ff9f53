"""What every stage needs: its run directory, the Ray session, pools, and workers, all cleaned up at the end."""

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rlhf_ray.checkpoint.atomic_directory import clear_leftovers
from rlhf_ray.checkpoint.store import Checkpoint, CheckpointStore
from rlhf_ray.checkpoint.uploader import Uploader, fetch_copy, fetch_newest
from rlhf_ray.cluster.nodes import present_nodes
from rlhf_ray.cluster.resource_pools import Pools
from rlhf_ray.cluster.session import Session, opening, ray_session, require_local_directories
from rlhf_ray.cluster.shared_files import require_shared_files
from rlhf_ray.cluster.worker_templates import LIBRARIES
from rlhf_ray.config.derived import model_paths, placements_of
from rlhf_ray.config.load import as_yaml
from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.config.run import PlacementConfig
from rlhf_ray.config.stages import StageConfig, role_facts
from rlhf_ray.config.training_loop import CheckpointConfig
from rlhf_ray.data.answers import TurnEnds
from rlhf_ray.data.load_report import LeftOutRows, left_out_lines
from rlhf_ray.errors import DataError, DiskStalled, RLHFError, StoppedEarly, SupersededError, UploadError
from rlhf_ray.files.writer_thread import HURRY_S, FileThread, RunFiles
from rlhf_ray.internals.asyncio import run_coroutine
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.observability.metrics import metric_rows_from_end
from rlhf_ray.observability.ownership import Ownership
from rlhf_ray.observability.report import write_report
from rlhf_ray.observability.run_directory import RunDirectory, read_json
from rlhf_ray.observability.sinks import require_trackers
from rlhf_ray.observability.start_phases import START, announce
from rlhf_ray.observability.tables import counted
from rlhf_ray.planning.findings import idle_gpus
from rlhf_ray.planning.worker_placement import place
from rlhf_ray.roles.learner import Learner
from rlhf_ray.workers.calls import Deadline, Method, Role
from rlhf_ray.workers.peers import PeerGroup
from rlhf_ray.workers.role_table import RoleRow
from rlhf_ray.workers.worker_group import WorkerGroup

T = TypeVar("T")
SHUTDOWN_GRACE_S = 10.0
FAILURE_SHUTDOWN_GRACE_S = 3.0
"""Time for workers to shut down cleanly: after a stage that succeeded, and after one that failed (some workers may
still be loading then, and receive no calls)."""


class Runtime:
    """Spawns the workers of a stage, and ends them."""

    def __init__(self, config: StageConfig, pools: Pools, scratch: Mapping[str, str] | None = None) -> None:
        """
        Args:
            scratch: environment variables that put a worker's temporary files into a directory that the stage
                removes.
        """
        self._config = config
        self._pools = pools
        self._placements = placements_of(config)
        self._scratch = scratch or {}
        self._groups: list[tuple[WorkerGroup[Any], Method[Any, Any] | None]] = []

    def spawn(
        self, role: str, cls: type[Role], placement: PlacementConfig, arguments: Callable[[int], Mapping[str, Any]],
        environment: Mapping[str, str] | None = None, shutdown: Method[Role, Any] | None = None, section: str = "",
        libraries: Sequence[str] = LIBRARIES,
    ) -> WorkerGroup[Role]:
        """Spawn the workers of one role.

        Args:
            shutdown: the role's method for a clean shutdown.
            section: the configuration section of the placement; empty for roles without one.
            libraries: as in `WorkerGroup`.
        """
        group = WorkerGroup(role, cls, placement, self._pools, arguments,
                            {**self._recording(), **(environment or {})},
                            self._config.cluster.call_timeout_s, self._config.logging.task_events,
                            section, libraries)
        self._groups.append((group, shutdown))
        return group

    def spawn_role(self, row: RoleRow[Role], arguments: Callable[[int], Mapping[str, Any]]) -> WorkerGroup[Role]:
        """Spawn the workers of a role that has a section, as its row and the section's facts say."""
        environment = dict(row.environment(self._config)) if row.environment else {}
        if row.temporary_files:
            environment |= self._scratch
        all_facts = role_facts(type(self._config))
        given = arguments
        if row.peers is not None:
            cluster = self._config.cluster
            peers: PeerGroup[Any] = PeerGroup(
                all_facts[row.peers].worker, Deadline(cluster.call_timeout_s, "cluster.call_timeout_s"),
                Deadline(cluster.heartbeat_timeout_s, "cluster.heartbeat_timeout_s"))

            def given(rank: int) -> Mapping[str, Any]:
                return {**arguments(rank), "generators": peers}

        return self.spawn(all_facts[row.section].worker, row.cls, self._placements[row.section], given, environment,
                          row.shutdown, row.section, row.libraries)

    def _recording(self) -> Mapping[str, str]:
        """Ray's record of calls has no times without this variable."""
        return {"RAY_PROFILING": "1"} if self._config.logging.task_events else {}

    async def shut_down(self, grace_s: float) -> None:
        """End all workers: by their shutdown methods within `grace_s`, then by killing them."""
        stopping = [group.values(method) for group, method in self._groups if method]
        try:
            with suppress(TimeoutError, RLHFError):
                async with asyncio.timeout(grace_s):
                    await asyncio.gather(*stopping, return_exceptions=True)
        finally:  # also when the shutdown is cancelled by a second signal
            for group, _ in self._groups:
                group.kill()
            self._groups.clear()


@asynccontextmanager
async def open_runtime(config: StageConfig, say: Callable[[str], None] | None = None) -> AsyncIterator[Runtime]:
    """Open the stage's pools with a deadline; workers and pools are released at the end in any case.

    Args:
        say: called with a message when the pools take long.
    """
    placements = placements_of(config)
    await warn_of_idle_gpus(config, placements)
    pools = Pools(config.pools, placements, config.cluster)
    await pools.open(config.cluster.start_timeout_s, say)
    grace_s = FAILURE_SHUTDOWN_GRACE_S
    with scratch(config) as variables:
        runtime = Runtime(config, pools, variables)
        try:
            models = {role: model_paths(config, role) for role in placements}
            writers = {section for section, facts in role_facts(type(config)).items() if facts.writes}
            await require_shared_files(Path(config.run.dir), placements, models, writers, pools)
            yield runtime
            grace_s = SHUTDOWN_GRACE_S
        finally:
            try:
                await runtime.shut_down(grace_s)
            finally:
                pools.close()


async def warn_of_idle_gpus(config: StageConfig, placements: dict[str, PlacementConfig]) -> None:
    """Log a warning if the cluster has GPUs that neither this run nor another job uses."""
    nodes = await asyncio.to_thread(present_nodes)
    if any(node.gpus_free for node in nodes) and (idle := idle_gpus(config, place(config.pools, placements, nodes),
                                                                    nodes)):
        logging.getLogger(__name__).warning(idle)


@contextmanager
def scratch(config: StageConfig) -> Iterator[dict[str, str]]:
    """A directory for temporary files of workers, since killed workers cannot remove theirs; yields the variables that
    point to it. Empty on a joined cluster, whose nodes have temporary directories of their own."""
    if config.cluster.address is not None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="rlhf-ray-", ignore_cleanup_errors=True) as directory:
        yield {"TMPDIR": directory}


async def start_learners(group: WorkerGroup[Learner], timeout_s: float) -> list[Any]:
    """Let the ranks of a learner rendezvous and build their engines, within `timeout_s`."""
    address = await group.rendezvous(0, timeout_s)
    return await group.start(address, group.deadline.seconds, timeout_s=timeout_s)


def learner_notes(role: str, started: Mapping[str, Any]) -> Iterator[str]:
    """Sentences about the parameters and compiled layers in a learner's `start` result."""
    trained = started["trained"]
    parameters = started["parameters"]
    share = "" if trained == parameters else f" of {parameters:,.0f} ({trained / parameters:.2%})"
    yield f"{role} trains {trained:,.0f}{share} parameters"
    if started["compiled"]:
        yield f"{role}: {started['compiled']}"


async def write_left_out(directory: RunDirectory, rows: LeftOutRows) -> None:
    """Write the rows of the data sets that were left out, with their reasons, to left_out.jsonl."""
    await directory.files.records.run(directory.write_text, directory.left_out.name, left_out_lines(rows))


@contextmanager
def owned_directory(config: StageConfig, resume: bool) -> Iterator[RunDirectory]:
    """The run's directory, owned by this process during the enclosed work; unfinished files of earlier owners are
    removed.

    Raises:
        ConfigError: `logging` needs a package that is not installed; a local cluster cannot use a directory of this
            machine; the run's directory cannot be used, holds another run, or has another owner.
    """
    require_trackers(config.logging)
    files = RunFiles(config.cluster.disk_timeout_s)
    with closing(files), ExitStack() as stack:
        files.records.do(require_local_directories, config.cluster)
        directory = files.records.do(RunDirectory.create, config.run.dir, resume)
        directory.files = files
        files.records.do(stack.enter_context, directory.owned())
        files.records.do(clear_leftovers, directory.path, r"[a-z_]+", directory.term)
        files.records.do(partial(directory.status.unlink, missing_ok=True))  # of an earlier driver
        files.records.do(CheckpointStore(directory.checkpoints, keep=1, term=directory.term).clean)
        yield directory


def probes_note(started: Iterable[Mapping[str, float]]) -> str:
    """A sentence about the comparisons with transformers in the `start` results of roles, one of each."""
    differences = [each["probe_difference"] for each in started]
    return (f"self-checks passed, {counted(len(differences), 'role')}: packed rows give what transformers gives, to "
            f"{max(differences):.2g}")


def ending_note(model: ModelConfig | NewModelConfig) -> str | None:
    """A sentence about the token that ends the chat template's answers, if the model's files do not name it."""
    tokenizer = load_tokenizer(model)
    named = model.path if isinstance(model, ModelConfig) else model.tokenizer
    return TurnEnds.of(tokenizer, model).note(named)


def run_stage(
    config: StageConfig, directory: RunDirectory, resume: bool,
    main: Callable[[Session], Coroutine[Any, Any, dict[str, Any]]],
) -> dict[str, Any]:
    """Run a stage's coroutine in its run directory and on its cluster, then write the summary and the report.

    Returns:
        The summary.

    Raises:
        SupersededError: another driver has taken over the directory; nothing was written after that.
        StoppedEarly: the run stopped itself before its last step; summary and report are written as well.
        DiskStalled: the disk of the run hangs.
    """
    files = directory.files
    with uploading(config, directory, resume), kept_if_refused(directory, resume):
        files.records.do(directory.write_text, directory.config.name, as_yaml(config))
        metadata = {"directory": str(directory.path.resolve()), "steps": str(config.run.steps),
                    "stage": type(config).__name__.removesuffix("Config")}
        opens = opening(config.cluster)
        if opens is not None:
            START.begin("Ray", opens)
        try:
            with ray_session(config.cluster, config.pools, directory.path.name, metadata) as session:
                summary = run_async(while_owned(directory.ownership, main(session)))
                if directory.metrics.is_file():
                    announce("ending Ray and writing the report" if opens else "writing the report")
        finally:  # until they end, workers may write to an abandoned checkpoint
            with suppress(OSError, DiskStalled, SupersededError):
                files.checkpoints.do(CheckpointStore(directory.checkpoints, keep=1, term=directory.term).clean)
        files.records.do(directory.write_json, "summary.json", summary)
        if directory.metrics.is_file():
            files.records.do(partial(write_report, directory.path, term=directory.term))
    if "stopped_early" in summary:
        raise StoppedEarly(f"stopped early after step {summary['steps']} of {config.run.steps}: "
                           f"{summary['stopped_early']}. Checkpoint, model and report are in {directory.path}; raise "
                           "the limit and use --resume to continue")
    return summary


@contextmanager
def kept_if_refused(directory: RunDirectory, resume: bool) -> Iterator[None]:
    """Write the former config.yaml again if a resume ends before its first step: it was refused, or failed to start,
    and the steps in the directory were made with the former one."""
    former = directory.config.read_text() if resume and directory.config.is_file() else None
    newest = CheckpointStore(directory.checkpoints, keep=1).newest_name()
    try:
        yield
    except BaseException:
        with suppress(OSError, DiskStalled, SupersededError, DataError):
            if former is not None and _newest_row(directory) <= (newest[0] if newest else 0):
                directory.files.records.do(directory.write_text, directory.config.name, former)
        raise


def _newest_row(directory: RunDirectory) -> int:
    """Step of the newest row of metrics; 0 without one."""
    return int(next((row["step"] for row in metric_rows_from_end(directory.path)), 0))


def fetch_uploaded(config: StageConfig, directory: RunDirectory) -> None:
    """Before a resume: download the run from `run.upload` if it is further ahead there.

    Raises:
        ConfigError: the location cannot be used.
    """
    if config.run.upload:
        fetch_newest(config.run.upload, directory.path, logging.getLogger(__name__).warning, directory.term)


def checkpoint_store(config: StageConfig, directory: RunDirectory, keep: int) -> CheckpointStore:
    """The run's checkpoints, of which `keep` are kept; damaged ones are fetched from `run.upload`, if intact there."""
    say = logging.getLogger(__name__).warning
    fetch = partial(fetch_copy, config.run.upload, say, directory.term) if config.run.upload else None
    return CheckpointStore(directory.checkpoints, keep, term=directory.term, fetch=fetch,
                           in_use=lambda: directory.being_uploaded)


def newest_checkpoint(store: CheckpointStore, resume: bool, directory: RunDirectory) -> Checkpoint | None:
    """The checkpoint that a resumed run continues from, recorded in the owner record; None for a new run. Raises the
    errors of `CheckpointStore.latest`."""
    start = store.latest() if resume else None
    if directory.ownership is not None:
        directory.ownership.go_on_from(start.step if start else None)
    return start


@contextmanager
def uploading(config: StageConfig, directory: RunDirectory, resume: bool) -> Iterator[None]:
    """Upload what the enclosed run writes to `run.upload`, and everything at the end, however it ends.

    Raises:
        ConfigError: the location cannot be used.
        UploadError: the run succeeded, and its last files were not uploaded.
    """
    if not config.run.upload:
        yield
        return
    keep: int = getattr(config, "checkpoint", CheckpointConfig()).keep  # the stage `preferences` has no checkpoints
    uploader = Uploader(config.run.upload, directory, config.cluster.call_timeout_s, keep)
    uploader.start(resume)
    try:
        yield
    except DiskStalled:
        raise  # a disk that cannot be written cannot be read either
    except BaseException:
        with suppress(UploadError, SupersededError):  # reported already; the reason for the run's end is raised
            uploader.finish()
        raise
    try:
        uploader.finish()
    except UploadError as error:
        directory.write_json(directory.summary.name, {**read_json(directory.summary), "upload_failed": str(error)})
        raise


async def while_owned(ownership: Ownership | None, main: Coroutine[Any, Any, T]) -> T:
    """The result of `main`, which is cancelled when another driver takes over the run's directory.

    Raises:
        SupersededError: another driver took over.
    """
    if ownership is None:
        return await main
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()

    def end() -> None:
        if task is not None:
            loop.call_soon_threadsafe(task.cancel)

    ownership.when_lost(end)
    try:
        return await main
    except BaseException:
        if ownership.lost is not None:  # takes precedence: another driver continues the run
            raise ownership.lost from None
        check = FileThread("owner record", HURRY_S)
        with suppress(OSError, DiskStalled), closing(check):
            check.do(ownership.term.check)
        raise
    finally:
        ownership.when_lost(lambda: None)


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; a cancelled one counts as interrupted by the user."""
    try:
        return run_coroutine(main)
    except asyncio.CancelledError as error:
        raise KeyboardInterrupt from error
