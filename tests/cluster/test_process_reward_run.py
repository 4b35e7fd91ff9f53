"""The process-reward stage and a PPO run for the model that it leaves: all numbers worked out again by transformers."""

import json
import math

import numpy as np
import pytest
import torch
import yaml

from rlhf_ray.config.data import StepsConfig
from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig, ProcessRewardConfig
from rlhf_ray.observability.metrics import read_metrics
from tests.cluster.conftest import SMALL
from tests.held_out import first_by_digest

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
ROWS = [{"prompt": f"w{10 + i} w20", "steps": [f"w{30 + i} w31", "w32", f"w{40 + i}"][: 1 + i % 3],
         "labels": [0.75, None, 0.1][: 1 + i % 3]} for i in range(12)]
SEPARATOR = "w63"
PLACEHOLDER, GOOD, BAD, BETWEEN = 9, 2, 3, 63


@pytest.fixture(scope="module")
def stage(files, tmp_path_factory):
    """(directory, summary) of three updates on soft labels."""
    from rlhf_ray.stages import process_reward

    root = tmp_path_factory.mktemp("steps")
    (root / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    settings = {
        "run": {"dir": str(root / "run"), "steps": 3},
        "cluster": {"dashboard": False, "object_store_mb": 128},
        "model": {"path": str(files.tied)},
        "data": {"path": str(root / "steps.jsonl"), "max_tokens": 16, "held_out": 0.4},
        "steps": {"placeholder": "w9", "good": "w2", "bad": "w3", "separator": SEPARATOR},
        "training": {"batch_size": 4},
        "learner": {"micro_batch_tokens": 64, "optimizer": {"learning_rate": 0.003}},
        "logging": {"ray_metrics": False, "tensorboard": False},
        "checkpoint": {"every": 0},
    }
    (root / "steps.yaml").write_text(yaml.safe_dump(settings))
    summary = process_reward.run(load(ProcessRewardConfig, root / "steps.yaml", []))
    return root / "run", summary


def probabilities(directory, prompt, steps):
    """Of the good against the bad token behind each step, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    tokens, found = tokenizer(prompt)["input_ids"], []
    for number, step in enumerate(steps):
        tokens += [*([BETWEEN] if number else []), *tokenizer(step)["input_ids"], PLACEHOLDER]
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        found.append(float(torch.sigmoid(logits[GOOD] - logits[BAD])))
    return found


def test_held_out_numbers_are_those_of_the_model_left(stage):
    directory, summary = stage
    held = first_by_digest(ROWS, 5)  # of 12 rows 0.4 are 4.8
    pairs = [(p, label) for row in held
             for p, label in zip(probabilities(directory, row["prompt"], row["steps"]), row["labels"], strict=True)
             if label is not None]
    losses = [-label * math.log(p) - (1 - label) * math.log(1 - p) for p, label in pairs]
    assert summary["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert summary["accuracy"] == pytest.approx(sum((p >= 0.5) == (label >= 0.5) for p, label in pairs) / len(pairs))
    assert summary["probability"] == pytest.approx(sum(p for p, _ in pairs) / len(pairs), abs=1e-5)
    assert {"process_reward/loss", "process_reward/accuracy"} <= read_metrics(directory)[0].keys()


def test_the_model_says_how_it_is_to_be_asked(stage):
    directory, _ = stage
    left = json.loads((directory / "model/process_reward.json").read_text())
    assert StepsConfig(**left) == StepsConfig(placeholder="w9", good="w2", bad="w3", separator=SEPARATOR)
    assert "process_reward.json" in (directory / "model/README.md").read_text()


@pytest.fixture(scope="module")
def ppo_run(stage, configure, tmp_path_factory):
    """A run of two steps for twice the centred values of steps, and what its assembler was given and made."""
    from rlhf_ray.stages import ppo

    directory = tmp_path_factory.mktemp("process") / "run"
    sections = {**SMALL, "run": {"steps": 2}, "checkpoint": {"every": 2},
                "algorithm": {"estimator": {"type": "gae", "gamma": 1.0, "lam": 1.0},
                              "kl": {"coef": 0.0, "kind": "fixed"}}}
    path = configure(directory, **sections)
    settings = yaml.safe_load(path.read_text())
    settings["rewards"] = {"steps": {"type": "process", "path": str(stage[0] / "model"), "value": "centred",
                                     "weight": 2.0}}
    path.write_text(yaml.safe_dump(settings))
    ppo.run(load(PPOConfig, path, []))
    return directory


def test_a_response_s_score_is_the_sum_over_its_steps(stage, ppo_run):
    import pyarrow.parquet as pq

    rows = pq.read_table(ppo_run / "samples/step_000001.parquet").to_pylist()
    counts = []
    for row in rows:
        steps = [step for step in row["response"].split(SEPARATOR) if step.strip()]
        counts.append(len(steps))
        values = [2 * p - 1 for p in probabilities(stage[0], row["prompt"], steps)] or [-1.0]
        assert row["reward/steps"] == pytest.approx(sum(values), abs=2e-3)
        assert row["score"] == pytest.approx(2 * row["reward/steps"], abs=1e-4)
    assert len(rows) >= 4 and max(counts) > 0


def test_the_run_says_what_steps_brought(ppo_run):
    rows = [row for row in read_metrics(ppo_run) if "reward/mean" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["reward/mean"] == pytest.approx(2 * row["reward/component/steps"], abs=1e-4)
        assert np.isfinite(row["policy/loss"]) and row["policy/grad_norm"] > 0
