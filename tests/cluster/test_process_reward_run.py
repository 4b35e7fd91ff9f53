"""The process-reward stage: its numbers are those of the model that it leaves, and a resumed run is the same."""

import json
import math
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import ProcessRewardConfig
from rlhf_ray.config.steps import StepsConfig
from rlhf_ray.data.preferences import held_out_rows
from rlhf_ray.observability.metrics import read_metrics

pytestmark = pytest.mark.cluster
ROWS = [{"prompt": f"w{10 + i} w20", "steps": [f"w{30 + i} w31", "w32", f"w{40 + i}"][: 1 + i % 3],
         "labels": [0.75, None, 0.1][: 1 + i % 3]} for i in range(12)]


@pytest.fixture(scope="module")
def run(files, tmp_path_factory):
    """(directory, summary) of three updates on soft labels, and the directory of one resumed after the second."""
    from rlhf_ray.stages import process_reward

    root = tmp_path_factory.mktemp("steps")
    (root / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    settings = {
        "run": {"dir": str(root / "run"), "steps": 3},
        "cluster": {"dashboard": False, "object_store_mb": 128},
        "model": {"path": str(files.policy)},
        "data": {"path": str(root / "steps.jsonl"), "max_tokens": 16, "held_out": 0.4},
        "steps": {"placeholder": "w9", "good": "w2", "bad": "w3"},
        "training": {"batch_size": 4},
        "learner": {"micro_batch_tokens": 64, "optimizer": {"learning_rate": 0.003}},
        "logging": {"ray_metrics": False, "tensorboard": False},
        "checkpoint": {"every": 2},
    }
    (root / "steps.yaml").write_text(yaml.safe_dump(settings))
    summary = process_reward.run(load(ProcessRewardConfig, root / "steps.yaml", []))
    shutil.copytree(root / "run", root / "again")
    shutil.rmtree(root / "again/checkpoints/step_3")
    again = load(ProcessRewardConfig, root / "steps.yaml", [f"--run.dir={root / 'again'}"])
    process_reward.run(again, resume=True)
    return root / "run", summary, root / "again"


def probabilities(directory, row):
    """Of w2 against w3 behind each step, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    tokens, found = tokenizer(row["prompt"])["input_ids"], []
    for step in row["steps"]:
        tokens += [*tokenizer(step)["input_ids"], 9]
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        found.append(float(torch.sigmoid(logits[2] - logits[3])))
    return found


def test_held_out_numbers_are_those_of_the_model_left(run):
    directory, summary, _ = run
    held = [row for row, out in zip(ROWS, held_out_rows([r["prompt"] for r in ROWS], 0.4), strict=True) if out]
    pairs = [(p, label) for row in held for p, label in zip(probabilities(directory, row), row["labels"], strict=True)
             if label is not None]
    losses = [-label * math.log(p) - (1 - label) * math.log(1 - p) for p, label in pairs]
    assert summary["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert summary["accuracy"] == pytest.approx(sum((p >= 0.5) == (label >= 0.5) for p, label in pairs) / len(pairs))
    assert summary["probability"] == pytest.approx(sum(p for p, _ in pairs) / len(pairs), abs=1e-5)
    assert {"process_reward/loss", "process_reward/accuracy"} <= read_metrics(directory)[0].keys()


def test_the_model_says_how_it_is_to_be_asked(run):
    directory, _, _ = run
    left = json.loads((directory / "model/process_reward.json").read_text())
    assert StepsConfig(**left) == StepsConfig(placeholder="w9", good="w2", bad="w3", separator="\n")
    assert "process_reward.json" in (directory / "model/README.md").read_text()


def test_the_resumed_run_is_the_same_run(run):
    directory, _, again = run
    one, two = (load_file(d / "model/model.safetensors") for d in (directory, again))
    assert all(one[name].equal(two[name]) for name in one)
