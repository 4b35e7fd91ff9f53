"""Runs with environments: killed at once and started again, or with a runner, a generator or an environment's process
killed in the middle of episodes, they end as the undisturbed one, bit for bit. Episodes that fail in every way are all
accounted for."""

import json
import os
import signal
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.replay.audit import audit, counts
from rlhf_ray.replay.ledger import open_for_reading
from tests.chat_templates import make_chat_tokenizer
from tests.cluster.conftest import SMALL
from tests.cluster.faults import WorkerFault, worker_faults
from tests.cluster.outside import start, wait_for_step
from tests.cluster.resumed import CLOCKS, TRAFFIC, assert_equal_runs, samples, steps, without
from tests.models import make_tiny_llama

pytestmark = pytest.mark.cluster
WORLD = Path(__file__).parent / "episode_world.py"
VOCAB = 448
MOMENT_S = 0.05
STOPS = list(range(30, 110))
REPAIRED = ("episodes/retries", "episodes/interrupted", "samples/bytes")
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


class EpisodeFault(WorkerFault):
    """The signal is sent while episodes have been under way for a moment, to a worker or a process of "environment"."""

    def inject(self, coordinator):
        """See `WorkerFault`."""
        roles = coordinator.roles
        begun = [task.since for task in roles.clock.under_way
                 if (task.role, task.phase) == ("episode_runner", self.phase)]
        if coordinator.state.step != self.step or not begun or roles.clock.now() - min(begun) < MOMENT_S:
            return
        if self.worker == "environment":
            keepers = psutil.Process(roles.runners.processes(0).pid).children()
            pids = [each.pid for keeper in keepers for each in keeper.children()
                    if "rlhf_ray.environments.host" in each.cmdline()]
        else:
            (group,) = [group for group in roles.groups() if group.role == self.worker]
            pids = [group.processes(0).pid]
        if pids:
            self.pids = (pids[0],)
            os.kill(pids[0], self.signal)


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


@pytest.mark.slow
def test_a_run_whose_driver_is_killed_ends_as_the_undisturbed_one(configure, sections, undisturbed, tmp_path):
    directory, log = tmp_path / "run", tmp_path / "log"
    run = {"steps": 3, "auto_resume": True, "dir": str(directory), "seed": 5}
    file = configure(directory, **{**sections, "run": run})
    file.write_text(file.read_text().replace("  prompts: null\n", ""))
    parent = start(file, log)
    wait_for_step(directory, 2, parent, log)
    (driver,) = psutil.Process(parent.pid).children()
    driver.kill()
    assert parent.wait(timeout=400) == 0, log.read_text()
    assert "died of SIGKILL; restarting it" in log.read_text()
    assert audited(directory)["committed"] == 3 * 8
    assert_equal_runs(undisturbed, directory)
