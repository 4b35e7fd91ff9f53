"""The driver of a run killed at once (`kill -9`): started again, by its parent or by hand, the run ends as the
undisturbed one, bit for bit, with one worker of each role and with two."""

import json
import os
import signal
import sys
import time
from contextlib import closing

import psutil
import pytest

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.observability.faults import read_faults
from rlhf_ray.replay.audit import audit
from rlhf_ray.replay.ledger import open_for_reading
from tests.cluster.conftest import SMALL
from tests.cluster.outside import free_port, rows_of, start, wait_for_step
from tests.cluster.resumed import assert_equal_runs

pytestmark = pytest.mark.cluster


def killed(configure, directory, after, **sections):
    """A run of four steps in `directory`, saved every two, that starts again by itself, and whose driver is killed when
    step `after` is made and the checkpoint of step 2 is in place."""
    log = directory.with_name("log")
    run = {"steps": 4, "auto_resume": True, "dir": str(directory), "seed": 5}
    parent = start(configure(directory, run=run, **sections), log)
    wait_for_step(directory, after, parent, log)
    until = time.monotonic() + 60
    while not (directory / "checkpoints/step_2").is_dir():
        assert time.monotonic() < until
        time.sleep(0.02)
    (driver,) = psutil.Process(parent.pid).children()
    driver.kill()
    assert parent.wait(timeout=400) == 0, log.read_text()
    assert "died of SIGKILL; restarting it from the checkpoint of step 2" in log.read_text()
    assert not driver.is_running()
    (event,) = read_faults(directory / "faults.jsonl")
    assert (event["role"], event["kind"], event["pid"], event["reason"]) == (
        "run", "died", driver.pid, "the run died of SIGKILL")
    assert "Lost on the way: run (died)" in (directory / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("after", [2, 3])
def test_a_killed_run_is_started_again_by_its_parent(finished, configure, tmp_path, after):
    """Killed when it is about to save, or has saved, the checkpoint of step 2; and in the next but one update."""
    directory = tmp_path / "run"
    killed(configure, directory, after)
    assert_equal_runs(finished.directory, directory)


def test_a_killed_run_with_a_single_worker_of_each_role_is_started_again(configure, tmp_path):
    from rlhf_ray.stages import ppo

    ppo.run(load(PPOConfig, configure(tmp_path / "undisturbed", **SMALL), []))
    killed(configure, tmp_path / "run", 3, **SMALL)
    assert_equal_runs(tmp_path / "undisturbed", tmp_path / "run")


@pytest.mark.slow
def test_a_killed_run_whose_rollouts_run_ahead_accounts_for_every_sample(configure, tmp_path):
    directory = tmp_path / "run"
    killed(configure, directory, 3, coordinator={"max_staleness": 2, "concurrency": 24})
    told = json.loads((directory / "summary.json").read_text())["ledger"]
    assert told["committed"] == 4 * 16 and told["attempts given up"] > 0
    with closing(open_for_reading(directory / "ledger.sqlite")) as db:
        assert audit(db, ended=True) == []
    trained = [row for row in rows_of(directory) if "reward/mean" in row]
    assert [row["step"] for row in trained] == [1, 2, 3, 4] and max(row["staleness/max"] for row in trained) <= 2


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_begins_anew_when_resumed(finished, configure, tmp_path):
    directory, log = tmp_path / "run", tmp_path / "log"
    file = configure(directory)
    run = start(file, log)
    wait_for_step(directory, 1, run, log)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    assert not (directory / "checkpoints").is_dir() or not list((directory / "checkpoints").glob("step_*"))
    again = start(file, log, "--resume")
    assert again.wait(timeout=400) == 0, log.read_text()
    assert_equal_runs(finished.directory, directory)


@pytest.mark.slow
def test_a_request_to_stop_ends_parent_and_run(configure, tmp_path):
    directory, log = tmp_path / "run", tmp_path / "log"
    parent = start(configure(directory, run={"steps": 100, "auto_resume": True, "dir": str(directory)}), log)
    wait_for_step(directory, 1, parent, log)
    family = psutil.Process(parent.pid).children(recursive=True)
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(timeout=120) == 75, log.read_text()
    assert "stopped by SIGTERM after step" in log.read_text() and "started again" not in log.read_text()
    _, alive = psutil.wait_procs(family, timeout=15)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


@pytest.fixture
def cluster(own_ray):
    """A cluster of its own that takes jobs: its address, and a client."""
    from ray.cluster_utils import Cluster
    from ray.job_submission import JobSubmissionClient

    port = free_port()
    made = Cluster(initialize_head=True, head_node_args={
        "num_cpus": 8, "object_store_memory": 128 * 2**20, "include_dashboard": True, "dashboard_host": "127.0.0.1",
        "dashboard_port": port})
    try:
        yield made.address, JobSubmissionClient(f"http://127.0.0.1:{port}")
    finally:
        made.shutdown()


def driver_of(directory):
    """The process that drives the run in a directory: the child of the one that looks after it."""
    for process in psutil.process_iter(["cmdline", "ppid"]):
        command = process.info["cmdline"] or []
        if "rlhf_ray.cli.main" in command and str(directory.parent / f"{directory.name}.yaml") in command:
            parent = psutil.Process(process.info["ppid"]).cmdline()
            if "rlhf_ray.cli.main" in parent and parent[0] == command[0]:
                return process
    return None


@pytest.mark.slow
def test_a_job_on_a_cluster_whose_driver_is_killed_goes_on_by_itself(finished, configure, tmp_path, cluster):
    address, jobs = cluster
    directory = tmp_path / "run"
    file = configure(directory, cluster={"address": address, "allow_open": True},
                     run={"steps": 4, "auto_resume": True, "dir": str(directory), "seed": 5})
    job = jobs.submit_job(entrypoint=f"{sys.executable} -m rlhf_ray.cli.main ppo {file}",
                          runtime_env={"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", os.getcwd())}})
    until = time.monotonic() + 300
    while not (directory / "checkpoints/step_2").is_dir():
        assert not jobs.get_job_status(job).is_terminal() and time.monotonic() < until, jobs.get_job_logs(job)
        time.sleep(0.05)
    driver = driver_of(directory)
    driver.kill()
    while not jobs.get_job_status(job).is_terminal():
        assert time.monotonic() < until + 300, jobs.get_job_logs(job)
        time.sleep(0.5)
    logs = jobs.get_job_logs(job)
    assert jobs.get_job_status(job) == "SUCCEEDED", logs
    assert "died of SIGKILL; restarting it from the checkpoint of step 2" in logs
    assert [event["pid"] for event in read_faults(directory / "faults.jsonl")] == [driver.pid]
    assert_equal_runs(finished.directory, directory)
