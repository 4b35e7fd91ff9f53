"""A PPO run on two data sets mixed by weight, evaluated on what it holds out of them, whose reward is made of a model,
a function of the user's and a rule: each is told, and the sum is the sum."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.observability.metrics import read_metrics
from tests.cluster.conftest import SMALL
from tests.cluster.processes import descendants

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
WEIGHTS = {"main": 0.5, "short": -0.25, "label": 2.0}
FUNCTION = """
def short(responses, labels, **others):
    assert set(others) == {"prompts", "finish_reasons", "prefills"}, others
    return [len(response.split()) + row["extra"] for response, row in zip(responses, labels)]
"""


@pytest.fixture(scope="module")
def run(configure, files, tmp_path_factory):
    """(directory of a run of two steps, evaluated before and after; prompts of both files)."""
    from rlhf_ray.stages import ppo

    root = tmp_path_factory.mktemp("mixed")
    (root / "mine.py").write_text(FUNCTION)
    texts = [[f"{first} w{n} w{m}" for n in range(10, 15) for m in range(20, 24)] for first in ("w2", "w3")]
    for name, prompts in zip("ab", texts, strict=True):
        rows = [{"prompt": text, "extra": i + 3, "truth": f"no {i}"} for i, text in enumerate(prompts)]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewards = {
        "main": {"weight": WEIGHTS["main"]},
        "short": {"type": "function", "function": f"{root}/mine.py:short", "weight": WEIGHTS["short"]},
        "label": {"type": "exact_match", "answer": "truth", "weight": WEIGHTS["label"], "wrong": 0.125},
    }
    prompts = {"path": None, "mix": [{"path": str(root / "a.jsonl"), "weight": 3}, {"path": str(root / "b.jsonl")}],
               "held_out": 0.25}
    sections = {**SMALL, "rewards": rewards, "prompts": prompts, "evaluation": {"prompts": None, "limit": None},
                "run": {"steps": 2}, "checkpoint": {"every": 0},
                "generator": {"workers": 1, "chunk": 16}}
    overrides = [f"--rewards.main.path={files.reward}", "--rewards.main.type=model"]
    ppo.run(load(PPOConfig, configure(root / "run", **sections), overrides))
    return root / "run", texts


def samples(directory):
    return [row for step in (1, 2) for row in
            pq.read_table(directory / f"samples/step_{step:06d}.parquet").to_pylist()]


def test_training_sees_the_data_sets_by_their_weights_and_no_prompt_that_is_held_out(run):
    directory, texts = run
    seen = [row["prompt"] for row in samples(directory)]
    assert len(seen) == 32, "two steps of eight prompts with two samples each"
    assert [sum(prompt in source for prompt in seen) for source in texts] == [24, 8]
    evaluated = json.loads((directory / "evaluation.json").read_text())
    shown = {text["prompt"] for text in evaluated["texts"]}
    assert shown and not shown & set(seen)


def test_all_that_is_held_out_is_evaluated(run):
    rows = [row for row in read_metrics(run[0]) if "eval/responses" in row]
    assert [row["eval/responses"] for row in rows] == [10, 10], "a quarter of forty"


def test_each_component_is_logged_and_the_total_is_their_weighted_sum(run):
    rows = [row for row in read_metrics(run[0]) if "reward/mean" in row]
    assert len(rows) == 2
    for row in rows:
        parts = {name: row[f"reward/component/{name}"] for name in WEIGHTS}
        assert row["reward/mean"] == pytest.approx(sum(WEIGHTS[n] * parts[n] for n in WEIGHTS), abs=1e-4)
        assert parts["short"] > 2 and parts["label"] == 0.125, "labels reach the function and the rule"
        assert all(row[f"reward/component/{name}/std"] >= 0 for name in WEIGHTS)
        assert [row[f"reward/failures/{name}"] for name in WEIGHTS] == [0, 0, 0]


def test_texts_carry_their_components(run):
    for row in samples(run[0]):
        assert row["score"] == pytest.approx(sum(WEIGHTS[n] * row[f"reward/{n}"] for n in WEIGHTS), abs=1e-4)


def test_held_out_components_are_measured(run):
    after = json.loads((run[0] / "evaluation.json").read_text())["after"]
    assert after["reward"] == pytest.approx(sum(WEIGHTS[n] * after[f"reward/{n}"] for n in WEIGHTS), abs=1e-4)
    assert np.isfinite(after["reward/main"])


def test_the_report_names_them(run):
    page = (run[0] / "report.html").read_text()
    assert "Components of the reward" in page and "short (function" in page


def test_the_functions_process_is_gone(run):
    assert descendants() == []
