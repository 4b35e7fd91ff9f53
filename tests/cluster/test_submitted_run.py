"""A PPO run as a job of a real cluster: followed, left, stopped, gone on with, killed; and its copies elsewhere."""

import re
import signal
import time
from pathlib import Path

import psutil
import pytest
import yaml

from rlhf_ray.checkpoint.remote import RemoteDirectory
from rlhf_ray.observability.metrics import read_metrics
from tests.cluster.conftest import SMALL, ppo_settings
from tests.cluster.ray_head import ray_head

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def until(what, timeout_s=240):
    """The first true value of `what()`."""
    end = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.2)
    return found


def read_to(process, pattern):
    """What a process prints, to the first line that begins with the pattern."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.match(pattern, line):
            break
    return "".join(lines)


def steps_of(directory):
    return [row["step"] for row in read_metrics(directory) if "reward/mean" in row] if directory.is_dir() else []


@pytest.fixture(scope="module")
def head():
    with ray_head() as started:
        yield started


@pytest.fixture(scope="module")
def project(files, tmp_path_factory):
    """A directory with a long run's configuration. A parent starts it again, so that Ray's request to stop reaches it
    twice."""
    project, directory = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("shared") / "tiny"
    upload = f"file://{tmp_path_factory.mktemp('elsewhere')}/tiny"
    settings = ppo_settings(files, directory)
    for name, section in SMALL.items():
        settings[name] = {**settings.get(name, {}), **section}
    settings["run"] = {"dir": str(directory), "steps": 100_000, "seed": 5, "upload": upload, "auto_resume": True}
    settings["checkpoint"] = {"every": 0, "keep": 2}
    (project / "ppo.yaml").write_text(yaml.safe_dump(settings))
    return project


@pytest.fixture(scope="module")
def submitted(head, project):
    """The run: submitted and detached from, stopped, gone on with to a near end."""
    run = yaml.safe_load((project / "ppo.yaml").read_text())["run"]
    directory, upload = Path(run["dir"]), run["upload"]
    follower = head.command("submit", "ppo.yaml", "--address", head.url, cwd=project)
    try:
        followed = read_to(follower, r"PPO: step \d+/100000  reward ")
        follower.send_signal(signal.SIGINT)
        followed += follower.communicate(timeout=60)[0]
    finally:
        follower.kill()
    job = re.search(r"submitted (tiny-\w+)", followed)[1]
    standing = head.run("status", job, "--address", head.url)
    stopped = head.run("stop", job, "--address", head.url, timeout_s=120)
    step = read_metrics(directory)[-1]["step"]
    listed = head.run("jobs", "--address", head.url)
    copies = RemoteDirectory(upload).steps()
    resumed = head.run("submit", "ppo.yaml", "--address", head.url, "--resume", f"--run.steps={step + 2}",
                       cwd=project, timeout_s=240)
    return {"head": head, "project": project, "directory": directory, "job": job, "code": follower.returncode,
            "followed": followed, "standing": standing, "stopped": stopped, "step": step, "listed": listed,
            "copies": copies, "resumed": resumed, "upload": upload}


def test_its_progress_is_followed_and_control_c_leaves_it_running(submitted):
    assert submitted["code"] == 130, submitted["followed"]
    assert re.search(r"^PPO: step \d+/100000  reward ", submitted["followed"], re.M)
    assert f"{submitted['job']} keeps running" in submitted["followed"]
    code, said = submitted["standing"]
    assert code == 0 and f"{submitted['job']}: running" in said and re.search(r"step \d+ of 100000, running", said)


def test_a_stopped_run_saves_its_last_step_and_says_how_to_go_on(submitted):
    code, said = submitted["stopped"]
    assert code == 0 and f"stopped by SIGTERM after step {submitted['step']} of 100000; the checkpoint is saved" in said
    assert "rlhf-ray submit ppo.yaml --address" in said and "--resume" in said
    assert "stopped; --resume continues it" in submitted["listed"][1]


def test_it_goes_on_where_it_stopped_and_ends_with_its_exit_code(submitted):
    code, said = submitted["resumed"]
    assert code == 0 and f"resuming after step {submitted['step']}" in said, said
    assert steps_of(submitted["directory"]) == list(range(1, submitted["step"] + 3))


def test_its_checkpoints_and_its_end_are_copied(submitted):
    assert submitted["copies"] == [submitted["step"]]
    names = RemoteDirectory(submitted["upload"]).names()
    assert {"summary.json", "report.html", "metrics.jsonl", "model/model.safetensors", "ledger.sqlite"} <= set(names)


def test_on_another_machine_the_run_goes_on_from_its_copies(submitted, tmp_path):
    elsewhere, steps = tmp_path / "elsewhere", submitted["step"] + 3
    code, said = submitted["head"].run(
        "submit", "ppo.yaml", "--address", submitted["head"].url, "--resume", f"--run.dir={elsewhere}",
        f"--run.steps={steps}", cwd=submitted["project"], timeout_s=240)
    assert code == 0 and f"copying the run with its checkpoint of step {steps - 1}" in said, said
    assert steps_of(elsewhere) == list(range(1, steps + 1))


def test_what_the_cluster_s_nodes_cannot_hold_is_refused_before_it_is_submitted(head, project):
    code, said = head.run("submit", "ppo.yaml", "--address", head.url, "--pools.default.cpus=100",
                          "--run.dir=/tmp/never", cwd=project, timeout_s=120)
    assert code == 2 and "does not fit" in said and f"the nodes of {head.url}" in said, said
    assert "never" not in head.run("jobs", "--address", head.url)[1]


def processes_of_run(directory):
    """Those on this machine that name a run's directory on their command lines."""
    return [process for process in psutil.process_iter(["cmdline"])
            if any(str(directory) in word for word in process.info["cmdline"] or [])]


def test_a_killed_job_is_gone_at_once_without_being_asked(head, project, tmp_path):
    directory = tmp_path / "killed"
    code, said = head.run("submit", "ppo.yaml", "--address", head.url, f"--run.dir={directory}",
                          f"--run.upload={tmp_path.as_uri()}/copies", "--no-follow", cwd=project)
    assert code == 0 and "rlhf-ray logs killed-" in said
    until(lambda: steps_of(directory))
    assert len(processes_of_run(directory)) >= 2, "the run and the parent that starts it again"
    began = time.monotonic()
    code, said = head.run("stop", "killed", "--address", head.url, "--force", timeout_s=100)
    assert code == 0 and re.search(r"killed [1-9]\d* processes of killed-", said), said
    assert time.monotonic() - began < 60 and "the checkpoint is saved" not in said
    assert not processes_of_run(directory) and not list(directory.glob("checkpoints/step_*"))
    assert "killed; --resume may continue it" in head.run("jobs", "--address", head.url)[1]
