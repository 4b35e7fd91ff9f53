"""Internals of Ray."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.job_config import JobConfig

VERSION = "2.60.0"
HEAD_RESOURCE = "node:__internal_head__"
"""A resource that only the head node has.

Source: 2.60.0, _common/constants.py (`HEAD_NODE_RESOURCE_NAME`).
Missing: `ray.nodes` does not say which node is the head.
Otherwise: planning takes another node for the driver's.
"""
CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""The smallest request of the control service.

Source: 2.60.0, the name in `_raylet.so`.
Missing: Ray's client reads the token from the environment or the home directory, and always sends it.
Otherwise: an open cluster is taken for one that requires a token.
"""
RECONNECT_TIMEOUT, RECONNECT_TIMEOUT_S = "RAY_gcs_rpc_server_reconnect_timeout_s", 60.0
"""The variable that sets after how many seconds without the head Ray's client ends the process, and its default.

Source: 2.60.0, the name in `_raylet.so`, a setting of Ray's C++ core.
Missing: an event or exception for a lost head.
Otherwise: a driver that loses the head ends with Ray's exit code, which is not resumed automatically.
"""
LOSE_MESSAGES, CALL_MESSAGE = "RAY_testing_rpc_failure", "CoreWorkerService.grpc_client.PushTask"
"""The variable that makes Ray lose messages, and the name of the message by which an actor's method is called.

Source: 2.60.0, the names in `_raylet.so`.
Missing: none is meant for users.
Otherwise: chaos reports messages that were not lost.
"""
NO_PRESTART = {"RAY_prestart_worker_first_driver": "0"}
"""Keeps Ray from starting processes before a worker needs one. All our workers have their own runtime environment, so
these processes would never be used.

Source: 2.60.0, the name in `_raylet.so`, a setting of Ray's C++ core.
Missing: a setting of `ray.init`.
Otherwise: idle processes take memory.
"""
DEATH = "A worker died or was killed while executing a task by an unexpected system error"
"""Beginning of the paragraph that Ray prints about a dead worker.

Source: 2.60.0, the text in the program `raylet`.
Missing: as in `hidden_death_messages`.
Otherwise: the paragraph is printed.
"""
SLOW_START = "The current node timed out during startup"
"""Beginning of the message of the plain `Exception` when a node's processes have not registered after 30 s.

Source: 2.60.0, _private/node.py (`Node.__init__`).
Missing: a setting for that time, and a type for the exception.
Otherwise: on a machine that is busy a local cluster is not started again.
"""
NO_AGENT = "No available agent to submit job"
"""Beginning of the answer of a job server that found no agent on the head within 10 s.

Source: 2.60.0, dashboard/modules/job/job_head.py (`submit_job`).
Missing: a status code of its own; it is 500, as of every other failure.
Otherwise: a job that is submitted while its cluster starts is refused.
"""
JOB_EXISTS = "already exists"
"""Part of the answer to a job whose id was submitted before.

Source: 2.60.0, dashboard/modules/job/job_manager.py (`submit_job`).
Missing: as for `NO_AGENT`.
Otherwise: a job whose first submission arrived although its answer said otherwise counts as refused.
"""
PACKAGING_LOGGER = "ray._private.runtime_env.packaging"
"""Logger of the code that packs a job's directory.

Source: 2.60.0, _private/runtime_env/packaging.py.
Missing: `JobSubmissionClient` prints its progress unasked.
Otherwise: its messages are printed.
"""


def put_value(key: str, value: str) -> None:
    """Write to the memory of the control service.

    Source: 2.60.0, experimental/internal_kv.py (so do `get_value` and `delete_values`).
    Missing: a store without an actor, whose process may hang or be lost as the one that writes.
    Otherwise: workers have no heartbeat, and stopped ones are found only by the deadlines of their calls.
    """
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(key.encode(), value.encode())


def get_value(key: str) -> str | None:
    """Read what `put_value` wrote."""
    from ray.experimental.internal_kv import _internal_kv_get

    value = _internal_kv_get(key.encode())
    return None if value is None else value.decode()


def delete_values(prefix: str) -> None:
    """Delete all values whose keys begin so."""
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(prefix.encode(), del_by_prefix=True)


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """The resources of each node that are not in use, by Ray's id of the node; at most a second old.

    Source: 2.60.0, _private/state.py (`available_resources_per_node`).
    Missing: `ray.available_resources` gives the sum over all nodes.
    Otherwise: pools cannot be opened, and plans of a running cluster fail.
    """
    from ray._private import state

    free: Mapping[str, Mapping[str, float]] = state.available_resources_per_node()
    return free


def drain_deadlines() -> Mapping[str, int]:
    """The nodes being drained by Ray's id, with the deadline in ms since 1970; 0 without a deadline.

    Source: 2.60.0, _private/state.py (`GlobalState.get_draining_nodes`).
    Missing: `ray.nodes` and `ray.util.state` do not say that a node is being drained.
    Otherwise: workers on such nodes are replaced only when they are lost.
    """
    from ray._private import state

    deadlines: Mapping[str, int] = state.state.get_draining_nodes()
    return deadlines


def dashboard_and_logs() -> tuple[str | None, str | None]:
    """Address (host:port) of the dashboard, and folder of the logs on this node; None for what is not known.

    Source: 2.60.0, _private/worker.py (`_global_node`), _private/node.py.
    Missing: only `ray.init` returns them, and a session inside another one did not call it.
    Otherwise: a run does not start.
    """
    from ray._private import worker

    node = worker._global_node
    return (None, None) if node is None else (getattr(node, "webui_url", None) or None, node.get_logs_dir_path())


def start_options(metrics_port: int | None, inline_bytes: int) -> dict[str, Any]:
    """Arguments of `ray.init` for a local cluster: the port of its metrics, and the largest result that is sent to its
    owner instead of the object store.

    Source: 2.60.0, _private/worker.py (`init`), `_raylet.so` (`max_direct_call_object_size`).
    Missing: `ray start` has a public option for the port, `ray.init` has not; there is none for the size.
    Otherwise: a local cluster does not start.
    """
    return {"_metrics_export_port": metrics_port, "_system_config": {"max_direct_call_object_size": inline_bytes}}


@contextmanager
def own_process_groups(variables: Mapping[str, str] | None = None) -> Iterator[None]:
    """Start Ray's processes in process groups of their own meanwhile, with these environment variables in addition.
    They still end when this process does.

    A terminal, `timeout` and schedulers send signals to a whole process group. Ray blocks SIGINT in the processes that
    it starts, but not SIGTERM: they would end at once, while the run still saves its checkpoint.

    Source: 2.60.0, _private/services.py (`ConsolePopen`, called by `start_ray_process`).
    Missing: a setting for Ray's own processes.
    Otherwise: a run that is stopped by SIGTERM to its group loses the steps since its last checkpoint.
    """
    from ray._private import services

    start = services.ConsolePopen

    def start_apart(*args: Any, env: Mapping[str, str], **settings: Any) -> Any:
        return start(*args, env={**env, **(variables or {})}, process_group=0, **settings)

    services.ConsolePopen = start_apart
    try:
        yield
    finally:
        services.ConsolePopen = start


def temporary_directory() -> Path:
    """Where a local cluster keeps sockets, logs and what the object store cannot hold.

    Source: 2.60.0, _common/utils.py (`get_default_system_temp_dir`).
    Missing: the directory of a cluster is known after its start only.
    Otherwise: another directory than Ray's is checked.
    """
    from ray._common.utils import get_default_system_temp_dir

    return Path(get_default_system_temp_dir())


def longest_socket(directory: Path, dashboard: bool) -> str:
    """The longest path of a socket of a local cluster of this process in that temporary directory.

    Source: 2.60.0, _private/node.py (`_init_temp`, `_prepare_socket_file`), dashboard/subprocesses/utils.py
        (`get_socket_path`).
    Missing: Ray checks some of its sockets while it starts, and waits for others that cannot be opened.
    Otherwise: a directory that is too long ends a run with Ray's message, or after a minute.
    """
    name = "dash_TaskEventsHead" if dashboard else "plasma_store"
    return f"{directory}/ray/session_2026-01-01_00-00-00_000000_{os.getpid()}/sockets/{name}"


def new_token_file() -> Path | None:
    """The file in which Ray would write a new token for a local cluster; None if there is one, or none is needed.

    Source: 2.60.0, _private/authentication/authentication_token_setup.py (`ensure_token_if_auth_enabled`).
    Missing: a check before the start.
    Otherwise: a home directory that cannot be written ends a run with Ray's traceback.
    """
    from ray._private.authentication.authentication_token_setup import AUTH_MODE_ENV_VAR, _get_default_token_path
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    needed = os.environ.get(AUTH_MODE_ENV_VAR, "token").lower() == "token"
    if not needed or AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
        return None
    path: Path = _get_default_token_path()
    return path


def write_token(file: Path) -> None:
    """Write a new token that only this user can read, unless there is a file already. Where links cannot be made, Ray
    writes its own.

    Source: 2.60.0, _private/authentication/authentication_token_setup.py (`generate_and_save_token`).
    Missing: the file that Ray writes has the permissions of the umask, so that usually all users can read it.
    Otherwise: another user of the machine who can enter the home directory can run code in the cluster.
    """
    from ray._private.authentication.authentication_token_generator import generate_new_authentication_token

    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent) as new:  # which has mode 0600
            new.write(generate_new_authentication_token())
            new.flush()
            os.link(new.name, file)  # never half a token, and never one in place of another's


def token_hint() -> str | None:
    """Where a person finds the token that this process's cluster requires; None if it requires none.

    Source: 2.60.0, `_raylet` (`get_authentication_mode`), and scripts/scripts.py (`get_auth_token`), which prints the
        token from the first of two variables and a file.
    Missing: the mode as part of a public interface.
    Otherwise: nobody is told how to open the dashboard.
    """
    from ray._raylet import AuthenticationMode, get_authentication_mode  # type: ignore[attr-defined]

    return where_the_token_is() if get_authentication_mode() == AuthenticationMode.TOKEN else None


def where_the_token_is() -> str:
    """The command that prints the token, or the variable that holds it; in Ray's own order."""
    if os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return "the value of RAY_AUTH_TOKEN"
    if file := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return f"`RAY_AUTH_TOKEN_PATH={shlex.quote(file)} ray get-auth-token` prints it"
    return "`ray get-auth-token` prints it"


def job_config(metadata: Mapping[str, str]) -> JobConfig:
    """Ray's configuration of this driver's job. Its workers search a directory of the driver for modules only if the
    driver does, too: a file json.py in the working directory would otherwise be found before the standard library's.

    Source: 2.60.0, _private/worker.py (`connect`), which adds the working directory to `_py_driver_sys_path`, and
        `_raylet.so`, which puts it first in each worker's `sys.path`.
    Missing: a setting for it.
    Otherwise: a file of the working directory that is named like a module breaks the workers.
    """
    from ray.job_config import JobConfig

    class DriversPath(JobConfig):
        def _get_proto_job_config(self) -> Any:
            searched = {os.path.abspath(path) for path in sys.path}  # "" is the working directory
            self._py_driver_sys_path: list[str] = [path for path in self._py_driver_sys_path if path in searched]
            return super()._get_proto_job_config()

    return DriversPath(metadata=dict(metadata))


@contextmanager
def kept_sigterm_handler() -> Iterator[None]:
    """Keep a handler of SIGTERM that this process has installed; Ray replaces it meanwhile by one that ends the
    process with exit code 15.

    Source: 2.60.0, _private/worker.py (`init`) and _private/node.py, which call _private/utils.py
        (`set_sigterm_handler`).
    Missing: a setting for it.
    Otherwise: a run that is stopped by SIGTERM before its loop, or after it, ends with another exit code.
    """
    from ray._private import utils

    replace = utils.set_sigterm_handler
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        utils.set_sigterm_handler = lambda _: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = replace


def start_processes_with(variables: Mapping[str, str]) -> None:
    """Set environment variables of the processes that Ray starts from now on, and not of this one.

    Source: 2.60.0, _private/services.py (`start_ray_process`, `env_updates`).
    Missing: Ray's processes inherit the environment of this one.
    Otherwise: chaos loses messages between Ray's own processes.
    """
    from ray._private import services

    start = services.start_ray_process

    def start_with_variables(*args: Any, env_updates: Mapping[str, str] | None = None, **settings: Any) -> Any:
        return start(*args, env_updates={**(env_updates or {}), **variables}, **settings)

    services.start_ray_process = start_with_variables


@contextmanager
def hidden_death_messages() -> Iterator[None]:
    """Do not print Ray's paragraph about each dead worker: the run logs one line about it. Ray's other messages are
    printed as usual, and its logs hold them all.

    Source: 2.60.0, _private/worker.py (`print_to_stdstream`).
    Missing: `log_to_driver=False` concerns the output of workers.
    Otherwise: the paragraph is printed.
    """
    from ray._private import worker

    printed = worker.print_to_stdstream

    def print_others(data: dict[str, Any], *args: Any, **keywords: Any) -> None:
        if not any(line.startswith(DEATH) for line in data["lines"]):
            printed(data, *args, **keywords)

    worker.print_to_stdstream = print_others
    try:
        yield
    finally:
        worker.print_to_stdstream = printed


def packed_files(directory: Path, excludes: Sequence[str]) -> list[Path]:
    """The files that Ray packs of a job's working directory.

    Source: 2.60.0, _private/runtime_env/packaging.py (`_dir_travel`, `_get_excludes`).
    Missing: only the upload itself tells what is in the archive.
    Otherwise: `rlhf-ray submit` fails, or checks other files than Ray packs.
    """
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

    files: list[Path] = []
    _dir_travel(directory, [_get_excludes(directory, list(excludes))], files.append, include_gitignore=True,
                logger=logging.getLogger(__name__))  # Ray's own logger would warn about .gitignore
    return [path for path in files if path.is_file()]


def largest_package() -> int:
    """Largest message to the control service, in bytes, in which a job's directory must fit.

    Source: 2.60.0, _private/runtime_env/packaging.py (`GCS_STORAGE_MAX_SIZE`).
    Missing: the limit is in the message of the error only, after the archive was made.
    Otherwise: `rlhf-ray submit` fails.
    """
    from ray._private.runtime_env.packaging import GCS_STORAGE_MAX_SIZE

    return int(GCS_STORAGE_MAX_SIZE)


def job_of_process(environment: Mapping[str, str]) -> str | None:
    """Submission id of the job whose driver a process is or was started by; None for others.

    Source: 2.60.0, _private/runtime_env/constants.py (`RAY_JOB_CONFIG_JSON_ENV_VAR`), dashboard/modules/job.
    Missing: a job's details name the node of its driver, but not its pid.
    Otherwise: `rlhf-ray stop --force` kills nothing.

    Raises:
        ValueError: the variable is not JSON.
    """
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

    text = environment.get(RAY_JOB_CONFIG_JSON_ENV_VAR)
    job: str | None = json.loads(text).get("metadata", {}).get("job_submission_id") if text else None
    return job


def direct_job_client(url: str, headers: Mapping[str, str]) -> Any:
    """A `JobSubmissionClient` whose requests, which carry a token, go to `url` and nowhere else: not to the target of a
    redirect, and not through a proxy of the environment.

    Source: 2.60.0, dashboard/modules/dashboard_sdk.py (`SubmissionClient._do_request`).
    Missing: a setting of the client; `requests` follows redirects and uses proxies.
    Otherwise: commands that use a job server fail.
    """
    from ray.job_submission import JobSubmissionClient

    class DirectClient(JobSubmissionClient):
        def _do_request(self, method: str, endpoint: str, **given: Any) -> Any:
            return super()._do_request(method, endpoint, allow_redirects=False,
                                       proxies=dict.fromkeys(("http", "https", "all")), **given)

    return DirectClient(url, headers=dict(headers))


def get_from_job_server(client: Any, path: str) -> Any:
    """The job server's response to a GET request with the client's token.

    Source: 2.60.0, dashboard/modules/dashboard_sdk.py (`SubmissionClient._do_request`).
    Missing: `ray.util.state.list_nodes` takes no token, and `StateApiClient` is a second client.
    Otherwise: plans and submissions to a running cluster fail.
    """
    return client._do_request("GET", path)


def version_of_server(client: Any) -> str:
    """The Ray version of a `JobSubmissionClient`'s cluster; "" if it does not say.

    Source: 2.60.0, dashboard/modules/dashboard_sdk.py (`SubmissionClient._server_ray_version`).
    Missing: `JobSubmissionClient.get_version` gives the version of the job API.
    Otherwise: commands that use a job server fail.
    """
    return client._server_ray_version or ""
