"""A rank of a supervised stage that is killed, or stopped: the run goes on from its last checkpoint, and ends as the
undisturbed one does, bit for bit."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
import yaml
from safetensors.torch import load_file

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import SFTConfig
from rlhf_ray.errors import WorkerError
from rlhf_ray.observability.metrics import read_metrics
from rlhf_ray.workers.worker_group import WorkerGroup
from tests.cluster.processes import descendants

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
TIMES = {"time", "time/step", "throughput/tokens_per_second"}


@pytest.fixture(scope="module")
def configured(files, shared_ray, tmp_path_factory):
    """configured(name, every) -> configuration of a run of 6 steps with two ranks, saved every so many."""
    root = tmp_path_factory.mktemp("supervised")
    rows = [{"text": f"w{2 + i} w{9 + i} w{20 + i}"} for i in range(24)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(name, every=2):
        settings = {
            "run": {"dir": str(root / name), "steps": 6, "seed": 3},
            "cluster": {"dashboard": False, "object_store_mb": 128, "heartbeat_timeout_s": 5, "call_timeout_s": 120},
            "model": {"path": str(files.policy)}, "data": {"path": str(root / "rows.jsonl"), "max_tokens": 16},
            "training": {"batch_size": 8},
            "learner": {"workers": 2, "micro_batch_tokens": 64, "optimizer": {"learning_rate": 0.003}},
            "logging": {"ray_metrics": False, "tensorboard": False}, "checkpoint": {"every": every},
        }
        (root / f"{name}.yaml").write_text(yaml.safe_dump(settings))
        return load(SFTConfig, root / f"{name}.yaml", [])

    return make


def struck(config, number, step=4, times=1):
    """The run whose second rank gets a signal with its update `step`, so many times; the pids."""
    from rlhf_ray.stages import sft

    call_all, pids = WorkerGroup.call_all, []

    def strike(group, method, *args, **options):
        if method.__name__ == "update" and args[0] == step and len(pids) < times:
            pids.append(group.processes(1).pid)
            os.kill(pids[-1], number)
        return call_all(group, method, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerGroup, "call_all", strike)
        sft.run(config)
    return pids


@pytest.fixture(scope="module")
def undisturbed(configured):
    from rlhf_ray.stages import sft

    config = configured("undisturbed")
    sft.run(config)
    return config.run.dir


@pytest.mark.parametrize(("name", "number", "every"), [
    ("stopped", signal.SIGSTOP, 2), ("killed", signal.SIGKILL, 2), ("unsaved", signal.SIGKILL, 0)])
def test_the_run_ends_as_the_undisturbed_one_bit_for_bit(configured, undisturbed, name, number, every):
    config = configured(name, every)
    (pid,) = struck(config, number)
    assert not psutil.pid_exists(pid) and descendants() == []
    rows, expected = ([{key: value for key, value in row.items() if key not in TIMES} for row in read_metrics(where)]
                      for where in (config.run.dir, undisturbed))
    assert rows == expected
    weights, others = (load_file(f"{where}/model/model.safetensors") for where in (config.run.dir, undisturbed))
    assert weights.keys() == others.keys() and all(weights[key].equal(others[key]) for key in weights)
    (fault,) = map(json.loads, Path(config.run.dir, "faults.jsonl").read_text().splitlines())
    assert fault["role"] == "sft_learner" and fault["outcome"].startswith("all learners restarted")
    usual_s = max(row["time/step"] for row in read_metrics(undisturbed) if "time/step" in row)
    assert fault["call_age_s"] < config.cluster.heartbeat_timeout_s + 2 * usual_s + 30, "noticed long before a deadline"


def test_learners_that_are_lost_again_end_the_run(configured):
    with pytest.raises(WorkerError, match=r"lost 2 times since the checkpoint of step 2 .*max_learner_restarts=1"):
        struck(configured("twice"), signal.SIGKILL, times=2)
