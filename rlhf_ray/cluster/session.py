"""One driver's connection to a Ray cluster: a private local one, or an existing one by address."""

import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import psutil
import ray

from rlhf_ray.cluster.head_node import head_watched, is_listening, raise_for_lost_head, require_listener
from rlhf_ray.cluster.processes import PLAIN_PYTHON, descendants, kill
from rlhf_ray.config.loopback import is_loopback
from rlhf_ray.config.run import ClusterConfig, PoolConfig
from rlhf_ray.errors import ClusterError, ClusterUnavailable, ConfigError, RLHFError
from rlhf_ray.files.writing import try_to_write
from rlhf_ray.internals.ray import (
    CHECK_ALIVE,
    NO_PRESTART,
    SLOW_START,
    dashboard_and_logs,
    hidden_death_messages,
    job_config,
    kept_sigterm_handler,
    longest_socket,
    new_token_file,
    own_process_groups,
    start_options,
    temporary_directory,
    token_hint,
    write_token,
)

LEAVE_S = 15.0
"""Longest time in which a local cluster's raylet answers that the driver leaves."""
CLUSTER_ENDS_S = 5.0
"""Time for the processes of a local cluster to end after its shutdown; then they are killed."""
SOCKET_BYTES = 107
"""Longest path of a socket on Linux (unix(7): 108 with the zero at its end)."""
LEAST_FREE_MIB = 64
"""Least free space of a temporary directory: that which a run's directory needs to begin."""
INLINE_BYTES = 4096
"""Largest result that Ray sends to its owner, the driver, instead of keeping it in the object store. Ray's default of
100 KiB would send whole chunks of tokens through the driver, to it and on to each of their readers."""


@dataclass(frozen=True)
class Session:
    """What a person needs to find the cluster."""

    address: str
    dashboard_url: str | None
    logs: str | None
    """Folder of the workers' logs on the head node, for a local cluster."""

    @property
    def dashboard_line(self) -> str | None:
        """The dashboard's address, and how to get in where it asks for a token; None without a dashboard."""
        if self.dashboard_url is None:
            return None
        hint = token_hint()
        return f"Ray dashboard at {self.dashboard_url}" + (f"; it asks for a token: {hint}" if hint else "")


@contextmanager
def ray_session(
    config: ClusterConfig, pools: dict[str, PoolConfig], name: str, metadata: Mapping[str, str] | None = None
) -> Iterator[Session]:
    """Connect (starting a local cluster when no address is configured), and disconnect at the end in any case. When the
    cluster loses its head meanwhile, the process ends, see `head`.

    A session inside another one joins it, so several stages can share one cluster.

    Args:
        metadata: what Ray's dashboard shows about this job.

    Raises:
        ClusterUnavailable: the address takes no connections, or a local cluster was not ready in time.
        ClusterError: the cluster cannot be joined or started, or others can reach it and it has no authentication.
    """
    if ray.is_initialized():
        yield _describe()
        return
    _quieten_ray()
    if config.address:
        require_listener(config.address)
    before = set(psutil.Process().children())
    namespace = f"{name}-{uuid4().hex[:8]}"  # two runs of one name on one cluster use the same worker names
    job = job_config({"job_name": name, **(metadata or {})})  # the name that the dashboard shows
    try:
        with kept_sigterm_handler():
            if config.address:
                ray.init(address=config.address, namespace=namespace, job_config=job, log_to_driver=False,
                         logging_level=logging.ERROR)
            else:
                _start_local(config, pools, namespace, job)
    except RLHFError:
        raise
    except Exception as error:  # Ray raises plain exceptions, and errors of the operating system
        where = f"reach the Ray cluster at {config.address!r}" if config.address else "start a local Ray cluster"
        lost = isinstance(error, ConnectionError | TimeoutError) or (
            config.address and not is_listening(config.address))
        raise (ClusterUnavailable if lost else ClusterError)(f"cannot {where}: {_brief(error)}") from error
    address, started = ray.get_runtime_context().gcs_address, set(psutil.Process().children()) - before
    at_start = family(started)  # a raylet may end before the shutdown; its agents are nobody's descendants then
    with head_watched(address):  # until after the shutdown, which waits for the head
        try:
            if config.address and not config.allow_open:
                require_token(address)
            with hidden_death_messages():
                yield _describe()
        except Exception as error:
            raise_for_lost_head(address, error)
            raise
        finally:
            with ended_with(at_start | family(started)):
                ray.shutdown()


def family(processes: Iterable[psutil.Process]) -> set[tuple[int, float]]:
    """Pids of processes and their descendants, with the times at which they were started."""
    members = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            members |= {(each.pid, each.create_time()) for each in (process, *descendants(process))}
    return members


@contextmanager
def ended_with(members: Iterable[tuple[int, float]]) -> Iterator[None]:
    """End these processes with the enclosed shutdown of a local cluster. Ray gives its raylet one second and kills it
    then; its agents outlive it for a minute, because they report that to the control service, which is gone as well.

    Ray's shutdown first takes leave of the raylet, without a deadline. One that does not answer, because it is stopped
    or its disk hangs, is killed after `LEAVE_S`.
    """
    members = set(members)
    unanswered = threading.Timer(LEAVE_S, _kill_raylets, (members,))
    unanswered.daemon = True
    unanswered.start()
    try:
        yield
    finally:
        unanswered.cancel()
        kill(members, CLUSTER_ENDS_S)


def _kill_raylets(members: Iterable[tuple[int, float]]) -> None:
    """Kill the raylets among these processes. The head stays: without it the driver would end with an error."""
    for pid, began in members:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.name() == "raylet" and process.create_time() == began:
                process.kill()


def _start_local(config: ClusterConfig, pools: dict[str, PoolConfig], name: str, job: Any) -> None:
    """Start a local cluster; again if it takes longer than Ray waits, which happens on a busy machine.

    Raises:
        TimeoutError: it was not ready after `cluster.start_timeout_s`.
    """
    # Logical CPUs are those that the pools request: on a laptop many light workers share few cores. The same holds for
    # custom resources.
    cpus = max(1, int(sum(p.cpus * p.bundles for p in pools.values()) + 0.999))
    custom: Counter[str] = Counter()
    for pool in pools.values():
        custom.update({kind: amount * pool.bundles for kind, amount in pool.resources.items()})
    if (token := new_token_file()) is not None:
        write_token(token)
    until = time.monotonic() + config.start_timeout_s
    while True:
        before = set(psutil.Process().children())
        try:
            with own_process_groups(PLAIN_PYTHON):
                ray.init(
                    address="local",  # otherwise RAY_ADDRESS, or a cluster that runs on this machine, would be joined
                    num_cpus=max(cpus, os.cpu_count() or 1),
                    resources=dict(custom),
                    object_store_memory=config.object_store_mb * 2**20,
                    include_dashboard=config.dashboard,
                    dashboard_host="127.0.0.1",
                    namespace=name,
                    job_config=job,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    **start_options(config.metrics_port, INLINE_BYTES),
                )
            return
        except Exception as error:
            if SLOW_START not in str(error):
                raise
            with ended_with(family(set(psutil.Process().children()) - before)):
                ray.shutdown()
            if time.monotonic() > until:
                raise TimeoutError("its processes were not ready within cluster.start_timeout_s="
                                   f"{config.start_timeout_s:g}. End other programs, or raise it") from error


def _brief(error: BaseException) -> str:
    """An error on one line: the first and the last of its lines, between which Ray has those of a log."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"


def require_local_directories(config: ClusterConfig) -> None:
    """Refuse the start of a local cluster whose temporary directory, or a home directory without a token, it could not
    use.

    Raises:
        ConfigError: naming the directory, and the variable to set.
    """
    if config.address or ray.is_initialized():
        return
    directory = temporary_directory()
    name = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), None)
    which = f"the temporary directory {name}={directory}" if name else f"the temporary directory {directory}"
    socket = longest_socket(directory, config.dashboard)
    if len(os.fsencode(socket)) > SOCKET_BYTES:
        raise ConfigError(f"{which} is too long: Ray's sockets in it have paths of {len(os.fsencode(socket))} bytes, "
                          f"and Linux allows {SOCKET_BYTES}; set RAY_TMPDIR to a shorter one, such as /tmp")
    fix = "set RAY_TMPDIR to a directory that this user may write to, on a disk with free space"
    _require_writable(directory, which, fix)
    if (free := shutil.disk_usage(directory).free) < LEAST_FREE_MIB * 2**20:
        raise ConfigError(f"{which} is on a disk with {free // 2**20} MiB free, and a local cluster needs "
                          f"{LEAST_FREE_MIB} MiB for its logs; make room, or set RAY_TMPDIR to another directory")
    if (token := new_token_file()) is not None:
        _require_writable(token.parent, f"the directory {token.parent}, where a local cluster keeps its token,",
                          "set HOME to a directory that this user may write to, or RAY_AUTH_TOKEN to a secret text")


def _require_writable(directory: Path, which: str, fix: str) -> None:
    try:
        try_to_write(directory, flush=False)
    except OSError as error:
        raise ConfigError(f"{which} cannot be written: {error.strerror or error}; {fix}") from error


def _describe() -> Session:
    dashboard, logs = dashboard_and_logs()
    return Session(ray.get_runtime_context().gcs_address, f"http://{dashboard}" if dashboard else None, logs)


def _quieten_ray() -> None:
    os.environ.setdefault("RAY_DEDUP_LOGS", "1")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray reports failed calls without a waiter on stderr; ours are the calls to workers that were given up.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    for variable, value in NO_PRESTART.items():
        os.environ.setdefault(variable, value)


TIMEOUT_S = 10.0
PROTECTED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE)
"""Status codes of a service that requires a token, or TLS."""


def require_token(address: str) -> None:
    """Refuse a cluster that others can reach and that has no authentication: Ray's API runs code for its callers.

    Args:
        address: host:port of the cluster's control service.

    Raises:
        ClusterError: the service does not listen on loopback, and answers without a token.
    """
    if is_loopback(address.rsplit(":", 1)[0]) or not answers_without_token(address):
        return
    raise ClusterError(
        f"the Ray cluster at {address} has no authentication: anyone who can reach it can run code there, also in "
        "your run. Start its nodes with RAY_AUTH_MODE=token and one token for all (`ray get-auth-token --generate` "
        "makes one). If its network is closed to others, set cluster.allow_open=true to join it")


def answers_without_token(address: str) -> bool:
    """Whether the control service answers a request without a token. A service behind TLS does not.

    Raises:
        ClusterError: it did not answer in time.
    """
    with grpc.insecure_channel(address) as channel:
        ask = channel.unary_unary(CHECK_ALIVE, request_serializer=bytes, response_deserializer=bytes)
        try:
            ask(b"", timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise ClusterError(f"the Ray cluster at {address} did not answer within {TIMEOUT_S:g} s when asked "
                                   "without a token; try again when it is less busy") from error
            return error.code() not in PROTECTED
    return True


def write_timeline(path: Path) -> None:
    """Write Ray's record of calls (kept with `logging.task_events`) as a Chrome trace. Blocks while Ray collects it."""
    ray.timeline(str(path))
