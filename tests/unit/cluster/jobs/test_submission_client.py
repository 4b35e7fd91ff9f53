"""Finding a job server, and what is said where there is none that we should speak to."""

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import aiohttp
import pytest
import ray
from ray.job_submission import JobDetails, JobStatus, JobType

from rlhf_ray.cluster.jobs import submission_client as module
from rlhf_ray.cluster.jobs.submission_client import JobServer, connect, find_token, url_of
from rlhf_ray.errors import ClusterError


@pytest.fixture
def answering():
    """answering(status) -> URL of a server that answers all with it, and the headers that it was shown."""
    servers = []

    def start(status):
        shown = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                shown.append({"path": self.path, **self.headers})
                code, where = status(self) if callable(status) else (status, None)
                body = b'{"ray_version": "%s"}' % ray.__version__.encode() if code == 200 else b""
                self.send_response(code)
                if where:
                    self.send_header("Location", where + self.path)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}", shown

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def no_token(monkeypatch, tmp_path):
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("written", "url"), [
    ("head:8265", "http://head:8265"), ("http://head:8265/", "http://head:8265"),
    ("https://ray.example.org", "https://ray.example.org"), ("http://[::1]:8265/#/jobs", "http://[::1]:8265")])
def test_an_address_is_written_in_many_ways(written, url):
    assert url_of(written) == url


@pytest.mark.parametrize("written", ["ray://head:10001", "auto://", "http://"])
def test_another_kind_of_address_is_refused_with_the_right_one(written):
    with pytest.raises(ClusterError, match=r"its dashboard's: http://HOST:8265"):
        url_of(written)


def test_where_nobody_answers_one_learns_how_to_get_there():
    with pytest.raises(ClusterError, match=r"no job server answers at http://127.0.0.1:9 .*ssh -L 8265"):
        connect("127.0.0.1:9")


def test_another_server_is_no_job_server(answering):
    url, _ = answering(404)
    with pytest.raises(ClusterError, match="answers with 404 where a job server"):
        connect(url)


def test_an_open_cluster_that_others_can_reach_is_refused_and_shown_no_token(answering, monkeypatch):
    url, shown = answering(200)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "f" * 32)
    monkeypatch.setattr(module, "is_loopback", lambda host: False)
    with pytest.raises(ClusterError, match=r"has no authentication.*allow_open"):
        connect(url)
    assert shown and not [headers for headers in shown if "Authorization" in headers]


@pytest.fixture
def token(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "f" * 32)


def protected(request):
    """Answers with a token only, and lists jobs under another address."""
    if "Authorization" not in request.headers:
        return 401, None
    return 200, None


def tokens(shown):
    return [headers["path"] for headers in shown if "Authorization" in headers]


def test_a_token_goes_to_another_machine_by_https_only_unless_one_says_so(answering, token, monkeypatch):
    url, shown = answering(protected)
    monkeypatch.setattr(module, "is_loopback", lambda host: False)
    with pytest.raises(ClusterError, match=r"could read it.*ssh -L 8265:127.0.0.1:\d+ 127.0.0.1.*--allow-plain-http"):
        connect(url)
    assert shown and not tokens(shown)
    connect(url, allow_plain_http=True)
    assert tokens(shown)


def test_a_token_does_not_follow_a_redirect(answering, token):
    """Not to the list of jobs, and not to what Ray's own client asks for."""
    elsewhere, shown_there = answering(200)
    for redirected in ("/api/jobs/", "/api/version"):
        def status(request, redirected=redirected):
            code, _ = protected(request)
            return (302, elsewhere) if code == 200 and request.path == redirected else (code, None)

        url, shown = answering(status)
        with pytest.raises(ClusterError):
            connect(url)
        assert redirected in tokens(shown) and not shown_there


def test_a_token_is_not_given_to_a_proxy_of_the_environment(answering, token, monkeypatch):
    proxy, shown_there = answering(200)
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, proxy)
    url, shown = answering(protected)
    connect(url)
    assert "/api/version" in tokens(shown) and not shown_there


def test_a_followed_log_takes_the_token_to_no_other_server(answering, token):
    elsewhere, shown_there = answering(404)

    def status(request):
        code, _ = protected(request)
        return (302, elsewhere.replace("127.0.0.1", "localhost")) if "tail" in request.path else (code, None)

    async def follow(server):
        return [line async for line in server.tail("job")]

    url, shown = answering(status)
    with pytest.raises(aiohttp.WSServerHandshakeError):
        asyncio.run(follow(connect(url)))
    assert any("tail" in path for path in tokens(shown)) and shown_there and not tokens(shown_there)


def test_a_server_that_wants_a_token_says_where_to_put_it(answering):
    url, _ = answering(401)
    with pytest.raises(ClusterError, match=r"requires a token \(401\).*~/.ray/auth_token.*RAY_AUTH_TOKEN"):
        connect(url)


def test_the_token_is_found_where_ray_looks_in_its_order(no_token, monkeypatch):
    assert find_token() is None
    (no_token / ".ray").mkdir()
    (no_token / ".ray/auth_token").write_text("usual\n")
    assert find_token() == "usual"
    (no_token / "named").write_text("named")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(no_token / "named"))
    assert find_token() == "named"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "given")
    assert find_token() == "given"
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/nowhere")
    with pytest.raises(ClusterError, match="RAY_AUTH_TOKEN_PATH=/nowhere"):
        find_token()


class Client:
    """What Ray's client answers about jobs that were asked to stop; `outputs` by id, None for one that is gone."""

    def __init__(self, outputs):
        self._outputs = outputs

    def list_jobs(self):
        about = {"run": "mine", "stage": "ppo"}
        return [JobDetails(submission_id=name, type=JobType.SUBMISSION, status=JobStatus.STOPPED, metadata=about,
                           entrypoint="") for name in self._outputs]

    def get_job_logs(self, name):
        if self._outputs[name] is None:
            raise RuntimeError("its node is gone")
        return self._outputs[name]


def test_a_job_that_finished_while_it_was_asked_to_stop_has_finished():
    server = JobServer(Client({
        "finished": "PPO: done in 3 s\nfinished: runs/mine\n", "stopped": "stopped by SIGTERM after step 3 of 9\n",
        "killed": "PPO: done in 3 s\n", "nothing": "", "gone": None}), "http://127.0.0.1:8265")
    assert {job.id: (job.describe_state(), job.exit_code) for job in server.jobs()} == {
        "finished": ("finished", 0), **dict.fromkeys(("stopped", "killed", "nothing", "gone"),
                                                    ("stopped; --resume continues it", 75))}


class TestWithoutAgent:
    """A submission to a head whose agent is not there, or not yet; Ray's client is stood in for."""

    ABSENT = "Request failed with status code 500: No available agent to submit job, please try again later.."

    @pytest.fixture
    def submit(self, monkeypatch):
        """submit(*answers) -> the id, and what was said; the last answer repeats."""
        monkeypatch.setattr(module, "AGENT_S", 0.05)
        monkeypatch.setattr(module, "AGENT_PAUSE_S", 0.01)
        said = []

        def start(*answers):
            left = list(answers)

            class Client:
                def submit_job(self, submission_id, **_):
                    answer = left.pop(0) if len(left) > 1 else left[0]
                    if answer is not None:
                        raise RuntimeError(answer)
                    return submission_id

            return JobServer(Client(), "http://h:8265").submit("true", "job-1", {}, {}, said.append), said

        return start

    def test_it_is_tried_again_and_that_is_said_once(self, submit):
        name, said = submit(self.ABSENT, self.ABSENT, None)
        assert name == "job-1" and len(said) == 1 and "no agent yet that starts jobs; trying again for 0 s" in said[0]

    def test_a_try_that_had_arrived_counts(self, submit):
        assert submit(self.ABSENT, "ValueError: Job with submission_id job-1 already exists. Please use")[0] == "job-1"

    def test_in_the_end_the_likely_cause_and_the_fix_are_said(self, submit):
        with pytest.raises(ClusterError, match=r"no agent on its node in \d+ tries .* another Ray on that machine has "
                                               r"the agent's port \(52365 .*--dashboard-agent-listen-port=0"):
            submit(self.ABSENT)

    def test_other_refusals_are_not_repeated(self, submit):
        with pytest.raises(ClusterError, match="already exists"):
            submit("Job with submission_id job-1 already exists", None)
