"""A reward so large that no loss is finite: the run leaves its update out, says so, and goes on."""

import json
from contextlib import closing

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.observability.metrics import read_metrics
from rlhf_ray.replay.audit import audit
from rlhf_ray.replay.ledger import open_for_reading
from tests.cluster.conftest import SMALL

pytestmark = pytest.mark.cluster
PROMPTS, A_STEP, SEED = 16, 8, 5
FUNCTION = """
def huge(responses, labels, **_):
    return [3e38 if row.get("huge") else len(response) / 10 for response, row in zip(responses, labels)]
"""


@pytest.fixture(scope="module")
def directory(configure, tmp_path_factory):
    """A run of two steps over as many prompts; all rewards of the first are close to what float32 ends at."""
    from rlhf_ray.stages import ppo

    root = tmp_path_factory.mktemp("not_finite")
    (root / "mine.py").write_text(FUNCTION)
    first = {row for _, row in PromptCursor(PROMPTS, SEED, shuffle=True).next(A_STEP)}
    rows = [{"prompt": f"w{i + 2} w{i + 3}", "huge": i in first} for i in range(PROMPTS)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = {**SMALL, "run": {"steps": 2, "seed": SEED}, "evaluation": {"limit": 1},
                "rewards": {"huge": {"type": "function", "function": f"{root}/mine.py:huge"}},
                "prompts": {"path": str(root / "prompts.jsonl")}, "checkpoint": {"every": 1}}
    file = configure(root / "run", **sections)
    settings = yaml.safe_load(file.read_text())
    del settings["rewards"]["main"]
    file.write_text(yaml.safe_dump(settings))
    ppo.run(load(PPOConfig, file, []))
    return root / "run"


def test_no_optimizer_step_of_that_update_is_applied_and_all_of_the_next(directory):
    rows = [row for row in read_metrics(directory) if "reward/mean" in row]
    told = [(row["policy/skipped_steps"], row["critic/skipped_steps"]) for row in rows]
    assert told == [(4, 4), (0, 0)]
    assert rows[0]["reward/mean"] is None or rows[0]["reward/mean"] > 1e38
    assert "policy/loss" not in rows[0] and rows[1]["policy/loss"] is not None


def test_the_samples_are_told_as_not_trained_on_and_the_books_are_right(directory):
    with closing(open_for_reading(directory / "ledger.sqlite")) as db:
        told = db.execute("SELECT step, state, count(*) FROM samples GROUP BY 1, 2 ORDER BY 1").fetchall()
        assert audit(db, ended=True) == []
    assert told == [(1, "not_applied", 16), (2, "committed", 16)]


def test_the_weights_change_by_the_next_update_only_and_are_numbers(directory, files):
    start, end = (load_file(d / "model.safetensors") for d in (files.policy, directory / "model"))
    assert all(np.isfinite(end[name]).all() for name in end)
    assert any((start[name] != end[name]).any() for name in end)
    state = json.loads((directory / "checkpoints/step_1/coordinator.json").read_text())["run"]
    assert state["kl"]["value"] == 0.1 and state["scores"]["count"] == 0, "nor do controllers learn from it"
