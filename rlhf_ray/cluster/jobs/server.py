"""The job server of a Ray cluster (its dashboard's port), asked with a token, and never where anybody may ask it.

A token is shown to nobody before the server has refused a question without one.
"""

import logging
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
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
from rlhf_ray.planning.nodes import Node

USUAL = "http://127.0.0.1:8265"
"""Where Ray puts it, on its head node."""
TIMEOUT_S = 20.0
OVERRULING = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
"""Variables that Ray's client prefers to the address it is given."""
REFUSED = (401, 403)
TALKATIVE = ("ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk",
             "ray._private.runtime_env.packaging")
"""Loggers of Ray's client, some of which set their own level when they are imported."""


class JobServer:
    """What we ask of it; errors said for a person."""

    def __init__(self, client: JobSubmissionClient, url: str) -> None:
        self._client, self.url = client, url

    def submit(self, entrypoint: str, job_id: str, environment: dict[str, Any], about: Mapping[str, str]) -> str:
        """Pack what `environment` names, send it, and have the job started; returns its id."""
        with said_plainly(self.url):
            return str(self._client.submit_job(entrypoint=entrypoint, submission_id=job_id, runtime_env=environment,
                                               metadata=dict(about)))

    def run_on(self, node: str, entrypoint: str, environment: Mapping[str, Any]) -> str:
        """Have a command run on one node of the cluster; returns the id of its job."""
        with said_plainly(self.url):
            return str(self._client.submit_job(entrypoint=entrypoint, runtime_env=dict(environment),
                                               entrypoint_label_selector={"ray.io/node-id": node}))

    def nodes(self) -> list[Node]:
        """What is alive of the cluster, as planning knows it; the head first."""
        with said_plainly(self.url):
            answer = self._client._do_request("GET", "/api/v0/nodes?limit=10000")
            if answer.status_code != 200:
                raise RuntimeError(f"it does not say which nodes it has (status {answer.status_code})")
            found = [node for node in answer.json()["data"]["result"]["result"] if node["state"] == "ALIVE"]
        return head_first([as_node(node["node_id"], node["node_name"], node["node_ip"], node["resources_total"],
                                   node.get("labels")) for node in found])

    def jobs(self) -> list[Job]:
        """All that were submitted, newest first."""
        with said_plainly(self.url):
            found = [job_of(details) for details in self._client.list_jobs() if details.submission_id]
        return sorted(found, key=lambda job: -(job.began or 0))

    def job(self, name: str) -> Job:
        """The job of this id, or the newest one of the run of this name.

        Raises:
            ClusterError: there is none; names those that are.
        """
        jobs = self.jobs()
        for job in jobs:
            if name == job.id:
                return job
        for job in jobs:
            if job.ours and name == job.about["run"]:
                return job
        known = ", ".join(job.id for job in jobs[:5] if job.ours) or "none"
        raise ClusterError(f"there is no job and no run {name!r} at {self.url}; the newest jobs there: {known}")

    def logs(self, job_id: str) -> str:
        """All that a job printed so far."""
        with said_plainly(self.url):
            return str(self._client.get_job_logs(job_id))

    def tail(self, job_id: str) -> AsyncIterator[str]:
        """What a job printed and prints, from the beginning to its end."""
        return self._client.tail_job_logs(job_id)

    def stop(self, job_id: str) -> None:
        """Have all processes of a job sent SIGTERM, and SIGKILL after the time that was set when it was submitted."""
        with said_plainly(self.url):
            self._client.stop_job(job_id)

    def forget(self, job_id: str) -> None:
        """Take a job that is over off the list."""
        with said_plainly(self.url):
            self._client.delete_job(job_id)


def connect(address: str | None, allow_open: bool = False) -> JobServer:
    """The job server at `address` (host:port or URL; RAY_API_SERVER_ADDRESS or this machine's where empty).

    Raises:
        ClusterError: nobody answers there, or no job server of our version of Ray; the token is missing or wrong;
            others can reach it and it has no authentication.
    """
    url = url_of(address or os.environ.get("RAY_API_SERVER_ADDRESS") or USUAL)
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    headers: dict[str, str] = {}
    if _ask(url, headers) in REFUSED:
        token = find_token()
        if token is None:
            raise ClusterError(f"the cluster at {url} asks for a token (401), and there is none here. {HOW}")
        headers = {"Authorization": f"Bearer {token}"}
        if (code := _ask(url, headers)) in REFUSED:
            raise ClusterError(f"the cluster at {url} refuses the token found here ({code}): it is another cluster's, "
                               f"or was changed. {HOW}")
    elif not allow_open and not is_loopback(urlsplit(url).hostname or ""):
        raise ClusterError(
            f"the cluster at {url} has no authentication: whoever can reach it can run code there. Start its nodes "
            "with RAY_AUTH_MODE=token and one token for all. Where its network is closed to others, "
            "cluster.allow_open=true (`--allow-open` of other commands) uses it as it is")
    with _own_address(), said_plainly(url):
        client = JobSubmissionClient(url, headers=headers)
        _check_version(url, client)
    return JobServer(client, url)


def url_of(address: str) -> str:
    """The URL of a job server, from what a person writes.

    Raises:
        ClusterError: it is another kind of address.
    """
    if "://" not in address:
        address = f"http://{address}"
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ClusterError(f"--address={address}: give the address of the cluster's job server, which is its "
                           f"dashboard's: http://HOST:8265, or {USUAL} behind a tunnel "
                           "(ssh -L 8265:127.0.0.1:8265 HEAD)")
    return f"{parts.scheme}://{parts.netloc}"


def _ask(url: str, headers: Mapping[str, str]) -> int:
    """What the server's jobs answer with to someone who shows this.

    Raises:
        ClusterError: nobody answers.
    """
    try:
        answer = httpx.get(f"{url}/api/jobs/", headers=dict(headers), timeout=TIMEOUT_S, trust_env=False)
    except httpx.HTTPError as error:
        raise ClusterError(
            f"no job server answers at {url} ({first_line(error)}). It is where the cluster's dashboard is (port 8265 "
            "of the head node), and mostly listens on that node alone: ssh -L 8265:127.0.0.1:8265 HEAD, or kubectl "
            "port-forward, brings it here") from error
    if answer.status_code not in (200, *REFUSED):
        raise ClusterError(f"{url} answers with {answer.status_code} where a job server of Ray lists its jobs: correct "
                           "host and port, or start the cluster with its dashboard (pip install 'ray[default]')")
    return answer.status_code


def _check_version(url: str, client: JobSubmissionClient) -> None:
    theirs, ours = client._server_ray_version or "", ray.__version__
    if theirs.split(".")[:2] != ours.split(".")[:2]:
        raise ClusterError(f"the cluster at {url} runs Ray {theirs}, and this package Ray {ours}: a run needs one "
                           "version on all sides; install the cluster's here, or this one there")


@contextmanager
def _own_address() -> Iterator[None]:
    """Keep Ray's client at the address that it is given."""
    kept = {name: os.environ.pop(name) for name in OVERRULING if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


@contextmanager
def said_plainly(url: str) -> Iterator[None]:
    """Errors of Ray's client as ours."""
    try:
        yield
    except AuthenticationError as error:
        raise ClusterError(f"the cluster at {url} refuses the token ({first_line(error)}). {HOW}") from error
    except (RuntimeError, ConnectionError, OSError, ValueError) as error:
        raise ClusterError(f"the job server at {url}: {first_line(error)}") from error


def job_of(details: JobDetails) -> Job:
    """Ray's record of a job as ours."""
    def seconds(ms: int | None) -> float | None:
        return ms / 1000 if ms else None

    return Job(details.submission_id or "", str(details.status), details.metadata or {}, details.message or "",
               seconds(details.start_time), seconds(details.end_time), details.driver_exit_code,
               details.driver_node_id, details.runtime_env or {})


VARIABLE, FILE_VARIABLE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
HOW = ("Copy the cluster's token to ~/.ray/auth_token (on its head node `ray get-auth-token` prints it), name its "
       f"file in {FILE_VARIABLE}, or put it into {VARIABLE}")


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
