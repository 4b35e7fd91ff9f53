"""A run whose reward is made of a model, a function of the user's and a rule: each is told, and the sum is the sum."""

import json

import numpy as np
import pytest

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.observability.metrics import read_metrics
from tests.cluster.conftest import SMALL
from tests.cluster.processes import descendants

pytestmark = pytest.mark.cluster
WEIGHTS = {"main": 0.5, "short": -0.25, "label": 2.0}
FUNCTION = """
def short(responses, labels, **others):
    assert set(others) == {"prompts", "finish_reasons"}, others
    return [len(response.split()) + row["extra"] for response, row in zip(responses, labels)]
"""


@pytest.fixture(scope="module")
def directory(configure, files, tmp_path_factory):
    """A run of two steps, evaluated before and after."""
    from rlhf_ray.stages import ppo

    root = tmp_path_factory.mktemp("rewards")
    (root / "mine.py").write_text(FUNCTION)
    prompts = root / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w{i} w{i + 1}", "extra": i, "truth": f"no {i}"}) + "\n"
                               for i in range(2, 22)))
    rewards = {
        "main": {"weight": WEIGHTS["main"]},
        "short": {"type": "function", "function": f"{root}/mine.py:short", "weight": WEIGHTS["short"]},
        "label": {"type": "exact_match", "answer": "truth", "weight": WEIGHTS["label"], "wrong": 0.125},
    }
    sections = {**SMALL, "rewards": rewards, "prompts": {"path": str(prompts)}, "run": {"steps": 2},
                "evaluation": {"prompts": str(prompts), "limit": 2}}
    overrides = [f"--rewards.main.path={files.reward}", "--rewards.main.type=model"]
    ppo.run(load(PPOConfig, configure(root / "run", **sections), overrides))
    return root / "run"


def test_each_component_is_logged_and_the_total_is_their_weighted_sum(directory):
    rows = [row for row in read_metrics(directory) if "reward/mean" in row]
    assert len(rows) == 2
    for row in rows:
        parts = {name: row[f"reward/component/{name}"] for name in WEIGHTS}
        assert row["reward/mean"] == pytest.approx(sum(WEIGHTS[n] * parts[n] for n in WEIGHTS), abs=1e-4)
        assert parts["short"] > 2 and parts["label"] == 0.125, "labels reach the function and the rule"
        assert all(row[f"reward/component/{name}/std"] >= 0 for name in WEIGHTS)
        assert [row[f"reward/failures/{name}"] for name in WEIGHTS] == [0, 0, 0]


def test_texts_carry_their_components(directory):
    import pyarrow.parquet as pq

    for row in pq.read_table(directory / "samples/step_000002.parquet").to_pylist():
        assert row["score"] == pytest.approx(sum(WEIGHTS[n] * row[f"reward/{n}"] for n in WEIGHTS), abs=1e-4)


def test_held_out_components_are_measured(directory):
    after = json.loads((directory / "evaluation.json").read_text())["after"]
    assert after["reward"] == pytest.approx(sum(WEIGHTS[n] * after[f"reward/{n}"] for n in WEIGHTS), abs=1e-4)
    assert np.isfinite(after["reward/main"])


def test_the_report_names_them(directory):
    page = (directory / "report.html").read_text()
    assert "Components of the reward" in page and "short (function" in page


def test_the_functions_process_is_gone(directory):
    assert descendants() == []
