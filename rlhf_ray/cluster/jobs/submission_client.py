"""Client of a Ray cluster's job server (on its dashboard's port).

A cluster that others can reach is used only if it requires a token. A token is sent only after the server has refused a
request without one, only to that server, and to other machines only by https.
"""

import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import ray
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobSubmissionClient

from rlhf_ray.cluster.jobs.job import Job
from rlhf_ray.cluster.nodes import as_node, head_first
from rlhf_ray.config.loopback import is_loopback
from rlhf_ray.errors import ClusterError, first_line
from rlhf_ray.internals.ray import (
    JOB_EXISTS,
    NO_AGENT,
    PACKAGING_LOGGER,
    direct_job_client,
    get_from_job_server,
    version_of_server,
)
from rlhf_ray.observability.progress import has_finished
from rlhf_ray.planning.node_spec import Node

DEFAULT_URL = "http://127.0.0.1:8265"
"""Ray's default address, on the head node."""
TIMEOUT_S = 20.0
AGENT_S = 60.0
"""Time for the agent of a cluster that has just started. The server itself waits 10 s for it before each answer."""
AGENT_PAUSE_S = 1.0
"""Between two submissions, in case the server answers without waiting."""
OVERRIDING_VARIABLES = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
"""Variables that Ray's client prefers over the address in its arguments."""
REFUSED = (401, 403)
VERBOSE_LOGGERS = ("ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk", PACKAGING_LOGGER)
"""Loggers of Ray's client, some of which set their own level on import."""


class JobServer:
    """The requests that this project makes; Ray's errors are raised as `ClusterError`."""

    def __init__(self, client: JobSubmissionClient, url: str, protected: bool = False) -> None:
        """
        Args:
            protected: the server required a token.
        """
        self._client, self.url, self.protected = client, url, protected

    def submit(self, entrypoint: str, job_id: str, environment: dict[str, Any], about: Mapping[str, str],
               say: Callable[[str], None]) -> str:
        """Pack the files that `environment` names, send them, and start the job; returns its id. Tries for `AGENT_S`
        where the head has no agent, which starts jobs and is ready some seconds after the job server.

        Args:
            say: is given a line when it tries again.

        Raises:
            ClusterError: the job was refused, or there was no agent in time.
        """
        until = time.monotonic() + AGENT_S
        tries = 0
        while True:
            tries += 1
            try:
                with ray_errors_as_ours(self.url):
                    return str(self._client.submit_job(entrypoint=entrypoint, submission_id=job_id,
                                                       runtime_env=environment, metadata=dict(about)))
            except ClusterError as error:
                if tries > 1 and JOB_EXISTS in str(error):  # an earlier try arrived after all
                    return job_id
                if NO_AGENT not in str(error):
                    raise
                left = until - time.monotonic()
                if left <= 0:
                    raise ClusterError(_without_agent(self.url, tries)) from error
            if tries == 1:
                say(f"the head of {self.url} has no agent yet that starts jobs; trying again for {left:.0f} s")
            time.sleep(min(AGENT_PAUSE_S, left))

    def run_on(self, node: str, entrypoint: str, environment: Mapping[str, Any]) -> str:
        """Run a command on one node of the cluster; returns the id of its job."""
        with ray_errors_as_ours(self.url):
            return str(self._client.submit_job(entrypoint=entrypoint, runtime_env=dict(environment),
                                               entrypoint_label_selector={"ray.io/node-id": node}))

    def nodes(self) -> list[Node]:
        """The alive nodes of the cluster, as planning describes them; the head first."""
        with ray_errors_as_ours(self.url):
            answer = get_from_job_server(self._client, "/api/v0/nodes?limit=10000")
            if answer.status_code != 200:
                raise RuntimeError(f"it does not list its nodes (status {answer.status_code})")
            alive = [node for node in answer.json()["data"]["result"]["result"] if node["state"] == "ALIVE"]
        return head_first([as_node(node["node_id"], node["node_name"], node["node_ip"], node["resources_total"],
                                   node.get("labels")) for node in alive])

    def jobs(self) -> list[Job]:
        """All submitted jobs, newest first."""
        with ray_errors_as_ours(self.url):
            jobs = [job_of(details) for details in self._client.list_jobs() if details.submission_id]
        return sorted(map(self._as_it_ended, jobs), key=lambda job: -(job.began or 0))

    def _as_it_ended(self, job: Job) -> Job:
        """Ray counts a job that was asked to stop as stopped, without an exit code, even if it had finished."""
        if job.ours and job.state == "STOPPED":
            with suppress(ClusterError):  # its output may be gone with its node
                if has_finished(self.logs(job.id)):
                    return replace(job, state="SUCCEEDED", code=0)
        return job

    def job(self, name: str) -> Job:
        """The job with this id, or the newest job of the run with this name.

        Raises:
            ClusterError: no job or run has that name; the message lists the newest jobs.
        """
        jobs = self.jobs()
        for job in jobs:
            if name == job.id:
                return job
        for job in jobs:
            if job.ours and name == job.about["run"]:
                return job
        known = ", ".join(job.id for job in jobs[:5] if job.ours) or "none"
        raise ClusterError(f"there is no job or run {name!r} at {self.url}; use one of the newest jobs there: {known}")

    def logs(self, job_id: str) -> str:
        """The job's output so far."""
        with ray_errors_as_ours(self.url):
            return str(self._client.get_job_logs(job_id))

    def tail(self, job_id: str) -> AsyncIterator[str]:
        """The job's output from its beginning to its end, as it comes."""
        return self._client.tail_job_logs(job_id)

    def stop(self, job_id: str) -> None:
        """Send SIGTERM to all processes of a job, and SIGKILL after the time set at its submission."""
        with ray_errors_as_ours(self.url):
            self._client.stop_job(job_id)

    def forget(self, job_id: str) -> None:
        """Remove a finished job from the list."""
        with ray_errors_as_ours(self.url):
            self._client.delete_job(job_id)


def connect(address: str | None, allow_open: bool = False, allow_plain_http: bool = False) -> JobServer:
    """The job server at `address` (host:port or URL; when empty, RAY_API_SERVER_ADDRESS or this machine's).

    Raises:
        ClusterError: there is no server, or it is not a job server of our version of Ray; the token is missing or
            wrong, or would be sent unencrypted; others can reach the server and it has no authentication.
    """
    url = url_of(address or os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT_URL)
    local = is_loopback(urlsplit(url).hostname or "")
    for name in VERBOSE_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    headers: dict[str, str] = {}
    if _status_code(url, headers) in REFUSED:
        if urlsplit(url).scheme == "http" and not local and not allow_plain_http:
            raise ClusterError(
                f"the cluster at {url} requires a token, and by http everyone on the way could read it. Forward the "
                f"server's port (ssh -L 8265:127.0.0.1:{urlsplit(url).port or 80} {urlsplit(url).hostname}) and give "
                f"--address={DEFAULT_URL}, or put a proxy with https in front of it. If the network is closed to "
                "others, give --allow-plain-http")
        token = find_token()
        if token is None:
            raise ClusterError(f"the cluster at {url} requires a token (401), and none was found here. {HOW}")
        headers = {"Authorization": f"Bearer {token}"}
        if (code := _status_code(url, headers)) in REFUSED:
            raise ClusterError(f"the cluster at {url} refuses the token found here ({code}): it belongs to another "
                               f"cluster, or was changed. {HOW}")
    elif not allow_open and not local:
        raise ClusterError(
            f"the cluster at {url} has no authentication: anyone who can reach it can run code there. Start its nodes "
            "with RAY_AUTH_MODE=token and one token for all. If its network is closed to others, set "
            "cluster.allow_open=true (`--allow-open` of other commands)")
    with _own_address(), ray_errors_as_ours(url):
        client = direct_job_client(url, headers)
        _check_version(url, client)
    return JobServer(client, url, protected=bool(headers))


def _without_agent(url: str, tries: int) -> str:
    return (f"the job server at {url} found no agent on its node in {tries} tries over {AGENT_S:g} s, so it cannot "
            "start a job. Usually another Ray on that machine has the agent's port (52365 unless set): start one of "
            "the two with `ray start --head --dashboard-agent-listen-port=0`, which takes a free one, or end one. "
            "Else logs/dashboard_agent.log in the head's /tmp/ray/session_latest says why it did not start")


def url_of(address: str) -> str:
    """The URL of a job server, from a host:port or URL.

    Raises:
        ClusterError: it is an address of another kind.
    """
    if "://" not in address:
        address = f"http://{address}"
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ClusterError(f"--address={address}: give the address of the cluster's job server, which is its "
                           f"dashboard's: http://HOST:8265, or {DEFAULT_URL} behind a tunnel "
                           "(ssh -L 8265:127.0.0.1:8265 HEAD)")
    return f"{parts.scheme}://{parts.netloc}"


def _status_code(url: str, headers: Mapping[str, str]) -> int:
    """Status code of the server's job list, requested with these headers.

    Raises:
        ClusterError: the server does not answer.
    """
    try:
        answer = httpx.get(f"{url}/api/jobs/", headers=dict(headers), timeout=TIMEOUT_S, trust_env=False)
    except httpx.HTTPError as error:
        raise ClusterError(
            f"no job server answers at {url} ({first_line(error)}). It is part of the cluster's dashboard (port "
            "8265 of the head node), and usually listens on that node only: forward the port by "
            "ssh -L 8265:127.0.0.1:8265 HEAD, or kubectl port-forward") from error
    if answer.status_code not in (200, *REFUSED):
        raise ClusterError(f"{url} answers with {answer.status_code} where a job server of Ray lists its jobs: correct "
                           "host and port, or start the cluster with its dashboard (pip install 'ray[default]')")
    return answer.status_code


def _check_version(url: str, client: JobSubmissionClient) -> None:
    theirs, ours = version_of_server(client), ray.__version__
    if theirs.split(".")[:2] != ours.split(".")[:2]:
        raise ClusterError(f"the cluster at {url} runs Ray {theirs}, and this package uses Ray {ours}: they must be "
                           "the same. Install the cluster's version here, or this one there")


@contextmanager
def _own_address() -> Iterator[None]:
    """Make Ray's client use the address that it is given."""
    removed = {name: os.environ.pop(name) for name in OVERRIDING_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(removed)


@contextmanager
def ray_errors_as_ours(url: str) -> Iterator[None]:
    """Raise errors of Ray's client as `ClusterError`."""
    try:
        yield
    except AuthenticationError as error:
        raise ClusterError(f"the cluster at {url} refuses the token ({first_line(error)}). {HOW}") from error
    except (RuntimeError, ConnectionError, OSError, ValueError) as error:
        raise ClusterError(f"the job server at {url}: {first_line(error)}") from error


def job_of(details: JobDetails) -> Job:
    """Convert Ray's record of a job."""
    def seconds(ms: int | None) -> float | None:
        return ms / 1000 if ms else None

    return Job(details.submission_id or "", str(details.status), details.metadata or {}, details.message or "",
               seconds(details.start_time), seconds(details.end_time), details.driver_exit_code,
               details.driver_node_id, details.runtime_env or {})


VARIABLE, FILE_VARIABLE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
HOW = ("Copy the cluster's token to ~/.ray/auth_token (on its head node `ray get-auth-token` prints it), set "
       f"{FILE_VARIABLE} to a file with it, or set {VARIABLE}")


def find_token() -> str | None:
    """The token from the environment, or from the file where Ray keeps it; in Ray's own order.

    Raises:
        ClusterError: the file that the environment names cannot be read.
    """
    if token := os.environ.get(VARIABLE, "").strip():
        return token
    if named := os.environ.get(FILE_VARIABLE):
        try:
            return Path(named).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ClusterError(f"{FILE_VARIABLE}={named}: the token cannot be read: {error}") from error
    usual = Path.home() / ".ray" / "auth_token"
    return usual.read_text(encoding="utf-8").strip() or None if usual.is_file() else None
