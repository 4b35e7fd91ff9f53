"""Runs with environments: with a runner, a generator, an environment's process or the driver lost in the middle of
episodes, these go on from their last turns, and the run ends as the undisturbed one, bit for bit."""

import json
import os
import re
import signal
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.replay.audit import audit, counts
from rlhf_ray.replay.ledger import open_for_reading
from rlhf_ray.roles.episode_journal import TRAINING, JournalReader, last_attempt
from tests.chat_templates import make_chat_tokenizer
from tests.cluster.conftest import SMALL
from tests.cluster.faults import WorkerFault, worker_faults
from tests.cluster.outside import start, wait_for_step
from tests.cluster.resumed import CLOCKS, TRAFFIC, assert_equal_runs, samples, steps, without
from tests.gone import gone
from tests.models import make_tiny_llama

pytestmark = pytest.mark.cluster
WORLD = Path(__file__).parent / "episode_world.py"
VOCAB = 448
TURNS = 3
"""Turns of unfinished episodes that are recorded before a fault."""
STOPS = list(range(30, 110))
REPAIRED = ("episodes/retries", "episodes/interrupted", "episodes/continued", "episodes/restarted", "samples/bytes")
"""Metrics that say what was repaired; the files of samples say it, too."""


@pytest.fixture(scope="module")
def sections(tmp_path_factory):
    """A run of three steps with two environments, saved after each step."""
    root = tmp_path_factory.mktemp("episodes")
    model = make_tiny_llama(root / "model", VOCAB, positions=512)
    make_chat_tokenizer(model, "qwen2.5")
    rows = [{"prompt": f"count {i}", "number": i, "how": i, "role": ("user", "tool")[i % 2], "turns": 2 + i % 3,
             "environment": ("one", "two")[i % 2]} for i in range(36)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    world = {"path": f"{WORLD}:Talk", "max_tokens": 200, "processes": 1}
    return {
        **SMALL, "critic": None, "rewards": None, "model": {"path": str(model)},
        "prompts": {"path": str(root / "prompts.jsonl"), "max_tokens": 64, "held_out": 0.1},
        "environments": {"one": {**world, "max_turns": 3}, "two": {**world, "max_turns": 2}},
        "evaluation": {"prompts": None, "every": 0, "limit": 2},
        "checkpoint": {"every": 1, "every_minutes": 0},
        "policy": {"workers": 1, "ema_decay": None, "micro_batch_tokens": 512, "optimizer": {"learning_rate": 1e-3}},
        "generator": {"workers": 1, "chunk": 4, "kv_cache_mb": 16,
                      "sampling": {"max_tokens": 16, "stop_token_ids": STOPS}},
        "algorithm": {"estimator": "grpo", "epochs": 1, "mini_batches": 2, "kl": {"coef": 0.1}},
        "coordinator": {"prompts_per_step": 4, "samples_per_prompt": 2}}


def play(configure, sections, directory, *faults, **more):
    """A whole run in this process; its directory."""
    from rlhf_ray.stages import ppo

    given = {**sections, **more, "run": {"steps": 3, **more.get("run", {})}}
    file = configure(directory, **given)
    file.write_text(file.read_text().replace("  prompts: null\n", ""))
    with worker_faults(*faults):
        ppo.run(load(PPOConfig, file, []))
    assert all(fault.pids for fault in faults), "a fault was never injected"
    return directory


@pytest.fixture(scope="module")
def undisturbed(configure, sections, tmp_path_factory):
    return play(configure, sections, tmp_path_factory.mktemp("undisturbed") / "run")


def turns_under_way(directory):
    """Recorded turns of the episodes of training that are not over yet."""
    turns = 0
    for path in directory.glob("episodes/*/episode_runner*.journal"):
        reader = JournalReader(path)
        reader.refresh()
        attempts = [last_attempt(entries) for (scope, _), entries in reader.entries.items() if scope == TRAINING]
        turns += sum(each.kind == "turn" for entries in attempts for each in entries if entries[-1].kind == "turn")
    return turns


class EpisodeFault(WorkerFault):
    """The signal is sent when turns of unfinished episodes are recorded, to a worker or the processes of all
    "environment"s."""

    def inject(self, coordinator):
        """See `WorkerFault`."""
        roles = coordinator.roles
        playing = {task.role for task in roles.clock.under_way} & {"episode_runner"}
        at = coordinator.state.step == self.step and playing
        if not at or turns_under_way(Path(coordinator.config.run.dir)) < TURNS:
            return
        if self.worker == "environment":
            keepers = psutil.Process(roles.runners.processes(0).pid).children()
            pids = [each.pid for keeper in keepers for each in keeper.children()
                    if "rlhf_ray.environments.host" in each.cmdline()]
        else:
            (group,) = [group for group in roles.groups() if group.role == self.worker]
            pids = [group.processes(0).pid]
        for pid in pids:
            os.kill(pid, self.signal)
        self.pids = tuple(pids)


def audited(directory):
    """The counts of a ledger that adds up."""
    with closing(open_for_reading(directory / "ledger.sqlite")) as db:
        assert audit(db, ended=True) == []
        return counts(db)


def assert_the_same(directory, undisturbed):
    weights = [(d / "model/model.safetensors").read_bytes() for d in (directory, undisturbed)]
    assert weights[0] == weights[1]
    rows = [without(steps(d), *CLOCKS, TRAFFIC, *REPAIRED) for d in (directory, undisturbed)]
    assert rows[0] == rows[1] and len(rows[0]) == 3
    assert samples(directory) == samples(undisturbed)


def test_a_runner_a_generator_and_an_environment_that_are_killed_change_nothing(
        configure, sections, undisturbed, tmp_path):
    faults = [EpisodeFault(worker, "episodes", step, signal.SIGKILL)
              for step, worker in enumerate(("episode_runner", "generator", "environment"))]
    directory = play(configure, sections, tmp_path / "run", *faults)
    assert audited(directory)["committed"] == 3 * 8
    assert_the_same(directory, undisturbed)
    runner, _, environment = steps(directory)
    assert runner["episodes/continued"] > 0 and environment["episodes/interrupted"] > 0
    assert not any(row["episodes/restarted"] or row["episodes/retries"] for row in steps(directory))
    assert_nothing_left(directory)


@pytest.mark.slow
def test_a_runner_a_generator_and_an_environment_that_are_stopped_change_nothing(
        configure, sections, undisturbed, tmp_path):
    faults = [EpisodeFault(worker, "episodes", step, signal.SIGSTOP)
              for step, worker in enumerate(("episode_runner", "generator", "environment"))]
    limits = {name: {**each, "timeout_s": {"step": 5}} for name, each in sections["environments"].items()}
    directory = play(configure, sections, tmp_path / "run", *faults, environments=limits,
                     cluster={"heartbeat_timeout_s": 6})
    assert audited(directory)["committed"] == 3 * 8
    assert_the_same(directory, undisturbed)
    assert_nothing_left(directory)
    assert all(gone(pid) for fault in faults for pid in fault.pids)


@pytest.mark.slow
def test_episodes_whose_environment_cannot_be_brought_back_begin_again_and_are_counted(
        configure, sections, undisturbed, tmp_path):
    other = {name: {**each, "path": each["path"].replace(":Talk", ":TalkOnce")}
             for name, each in sections["environments"].items()}
    directory = play(configure, sections, tmp_path / "run", EpisodeFault("episode_runner", "episodes", 1,
                                                                         signal.SIGKILL), environments=other)
    assert audited(directory)["committed"] == 3 * 8
    assert_the_same(directory, undisturbed)  # it answers alike all the same
    assert steps(directory)[1]["episodes/restarted"] > 0
    assert_nothing_left(directory)


def assert_nothing_left(directory):
    """No file of its episodes, and no process of its environments."""
    assert not (directory / "episodes").exists()
    command = "rlhf_ray.environments.host"
    found = [each for each in psutil.process_iter(["cmdline", "environ"]) if command in (each.info["cmdline"] or [])]
    assert not [each for each in found if gone(each.ppid())]


@pytest.mark.slow
def test_a_run_whose_driver_is_killed_ends_as_the_undisturbed_one(configure, sections, undisturbed, tmp_path):
    directory, log = tmp_path / "run", tmp_path / "log"
    run = {"steps": 3, "auto_resume": True, "dir": str(directory), "seed": 5}
    file = configure(directory, **{**sections, "run": run})
    file.write_text(file.read_text().replace("  prompts: null\n", ""))
    parent = start(file, log)
    wait_for_step(directory, 1, parent, log)
    while turns_under_way(directory) < TURNS:
        assert parent.poll() is None, log.read_text()
        time.sleep(0.002)
    (driver,) = psutil.Process(parent.pid).children()
    driver.kill()
    assert parent.wait(timeout=400) == 0, log.read_text()
    assert "died of SIGKILL; restarting it" in log.read_text()
    assert re.search(r"\d episodes go on from their journals, after [1-9]\d* turns", log.read_text())
    assert audited(directory)["committed"] == 3 * 8
    assert_equal_runs(undisturbed, directory, *REPAIRED)
    assert_nothing_left(directory)
