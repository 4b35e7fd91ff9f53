"""A job that is submitted to a real cluster with a token, and what is asked of its job server."""

import json
import subprocess

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from rlhf_ray.cli.main import app
from rlhf_ray.errors import RLHFError
from tests.cluster.conftest import ppo_settings
from tests.cluster.ray_head import TOKEN, ray_head

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def ask(head, *words, token=TOKEN):
    """Exit code and output of a command about the cluster's jobs, within this process."""
    answer = CliRunner().invoke(app, [*words, "--address", head.url],
                                env={"RAY_AUTH_TOKEN": token, "HOME": head.environment["HOME"]})
    if isinstance(answer.exception, RLHFError):
        return answer.exception.exit_code, str(answer.exception)
    return answer.exit_code, answer.output


@pytest.fixture(scope="module")
def refused(files, tmp_path_factory):
    """A job that the cluster refuses at once: its model is nowhere. The run lies outside of what is packed."""
    project = tmp_path_factory.mktemp("project")
    (project / "config").mkdir()
    (project / "runs").mkdir()
    (project / "runs/large.bin").write_bytes(bytes(1000))
    settings = ppo_settings(files, tmp_path_factory.mktemp("out") / "tiny")
    settings["model"]["path"] = "/nowhere/at/all"
    (project / "config/ppo.yaml").write_text(yaml.safe_dump(settings))
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    git = ["git", "-C", str(project), "-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "begin"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    with ray_head(cpus=2) as head:
        code, output = head.run("submit", "config/ppo.yaml", "--address", head.url, "--run.steps=3", cwd=project,
                                RAY_ADDRESS="http://127.0.0.1:1")
        yield {"head": head, "code": code, "output": output, "commit": commit, "project": project}


def test_a_followed_job_ends_with_its_own_exit_code_and_output(refused):
    assert refused["code"] == 2, refused["output"]
    assert "/nowhere/at/all" in refused["output"].splitlines()[-2], refused["output"]
    assert refused["output"].splitlines()[-1].endswith("was refused (exit code 2)")


def test_what_cannot_be_seen_from_here_is_named_and_runs_are_not_packed(refused):
    assert "not visible from here, so the job will check it when it starts: /nowhere/at/all" in refused["output"]
    assert "packing 1 files" in refused["output"]
    assert "no plan was made for the cluster" in refused["output"]


def test_the_job_is_listed_with_its_run_stage_and_commit(refused):
    code, output = ask(refused["head"], "jobs")
    assert code == 0
    (line,) = [line for line in output.splitlines() if line.startswith("tiny-")]
    assert "ppo" in line and "was refused (exit code 2)" in line and refused["commit"][:12] in line


def test_logs_and_status_find_it_by_the_run_s_name(refused):
    code, output = ask(refused["head"], "logs", "tiny")
    assert code == 0 and "/nowhere/at/all" in output
    code, output = ask(refused["head"], "status", "tiny")
    assert code == 0 and "was refused (exit code 2)" in output and f"commit: {refused['commit']}" in output


def test_a_job_that_is_over_is_not_stopped(refused):
    code, output = ask(refused["head"], "stop", "tiny")
    assert code == 0 and "is over: was refused" in output


def test_a_job_that_is_not_there_is_refused_with_those_that_are(refused):
    code, output = ask(refused["head"], "logs", "other")
    assert code == 1 and "there is no job or run 'other'" in output and "tiny-" in output


@pytest.mark.parametrize(("token", "said"), [("", "none was found here"),
                                             ("f" * 32, "refuses the token found here (403)")])
def test_without_the_token_nothing_is_told(refused, token, said):
    code, output = ask(refused["head"], "jobs", token=token)
    assert code == 1 and said in output and "ray get-auth-token" in output


def test_the_job_server_keeps_what_the_job_was_submitted_with(refused):
    (job,) = httpx.get(f"{refused['head'].url}/api/jobs/", headers={"Authorization": f"Bearer {TOKEN}"}).json()
    about = job["metadata"]
    assert json.loads(about["arguments"]) == ["config/ppo.yaml", "--run.steps=3"] and about["stage"] == "ppo"
    assert len(about["config"]) == 12 and about["stop_wait_s"] == "120"
    assert job["runtime_env"]["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == "120"
