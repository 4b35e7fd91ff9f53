"""The reward-model stage on pairs with margins: what it reports is the loss worked out on the model that it leaves,
and what a further run starts with."""

import json
import math
import shutil

import pytest
import torch
import yaml

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import RewardModelConfig
from rlhf_ray.observability.metrics import read_metrics
from tests.held_out import first_by_digest

pytestmark = pytest.mark.cluster
MARGINS = [0.0, 0.5, 3.0, 1.25]


def padding_with_its_end(model, directory):
    """A copy of a model whose padding token is its end token."""
    shutil.copytree(model, directory)
    for name, key, value in (("config.json", "pad_token_id", 1), ("tokenizer_config.json", "pad_token", "</s>")):
        settings = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps({**settings, key: value}))
    return directory


@pytest.fixture(scope="module")
def run(files, tmp_path_factory):
    """(directory, rows, summary) of two updates on pairs with margins, half of them held out."""
    from rlhf_ray.stages import reward_model

    root = tmp_path_factory.mktemp("margins")
    rows = [{"prompt": f"w{5 + i} w9", "chosen": f"w{20 + i} w30", "rejected": f"w{40 + i}", "gap": MARGINS[i % 4]}
            for i in range(16)]
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "run": {"dir": str(root / "run"), "steps": 2},
        "cluster": {"dashboard": False, "object_store_mb": 128},
        "model": {"path": str(padding_with_its_end(files.policy, root / "start"))},
        "data": {"path": str(root / "pairs.jsonl"), "max_tokens": 16, "held_out": 0.5, "margin": "gap"},
        "training": {"batch_size": 8},
        "learner": {"micro_batch_tokens": 64, "optimizer": {"learning_rate": 0.003}},
        "logging": {"ray_metrics": False, "tensorboard": False},
        "checkpoint": {"every": 0},
    }
    (root / "rm.yaml").write_text(yaml.safe_dump(settings))
    summary = reward_model.run(load(RewardModelConfig, root / "rm.yaml", []))
    return root / "run", rows, summary


def distances(directory, rows):
    """Score of the chosen less that of the rejected response, each row on its own."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(directory / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")

    def score(row, side):
        tokens = tokenizer(f"{row['prompt']} {row[side]}")["input_ids"] + [tokenizer.eos_token_id]
        with torch.no_grad():
            return float(model.score(model.model(torch.tensor([tokens])).last_hidden_state[0, -1]))

    return [score(row, "chosen") - score(row, "rejected") for row in rows]


def test_the_held_out_loss_is_beyond_each_pairs_margin(run):
    directory, rows, summary = run
    held = held_out(rows)
    found = distances(directory, held)
    losses = [math.log1p(math.exp(row["gap"] - distance)) for row, distance in zip(held, found, strict=True)]
    assert summary["loss"] == pytest.approx(sum(losses) / len(held), abs=1e-5)
    without = sum(math.log1p(math.exp(-distance)) for distance in found) / len(held)
    assert abs(summary["loss"] - without) > 0.1, "without margins the number would be another"


def test_accuracy_is_of_the_ranking_alone(run):
    directory, rows, summary = run
    found = distances(directory, held_out(rows))
    assert summary["accuracy"] == pytest.approx(sum(distance > 0 for distance in found) / len(found))
    assert {"reward_model/loss", "reward_model/accuracy"} <= read_metrics(directory)[0].keys()


def test_transformers_scores_the_export_alike_padded_on_either_side(run):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    directory, rows, _ = run
    model = AutoModelForSequenceClassification.from_pretrained(directory / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    texts = [f"{row['prompt']} {row[side]} {tokenizer.eos_token}" for side in ("chosen", "rejected") for row in rows]
    for side in ("right", "left"):
        with torch.no_grad():
            inputs = tokenizer(texts, padding=True, padding_side=side, return_tensors="pt")
            chosen, rejected = model(**inputs).logits[:, 0].chunk(2)
        assert (chosen - rejected).tolist() == pytest.approx(distances(directory, rows), abs=1e-4)


def test_a_trained_reward_model_goes_on_with_its_head(run, tmp_path, capsys):
    """Measured before its first update, it is the model that it starts from."""
    from rlhf_ray.stages import reward_model

    directory, _, summary = run
    settings = yaml.safe_load((directory.parent / "rm.yaml").read_text())
    settings["run"] = {"dir": str(tmp_path / "run"), "steps": 1}
    settings["model"] = {"path": str(directory / "model")}
    (tmp_path / "rm.yaml").write_text(yaml.safe_dump(settings))
    reward_model.run(load(RewardModelConfig, tmp_path / "rm.yaml", []))
    captured = capsys.readouterr()
    assert f"the scalar head is that of {directory / 'model'}" in captured.out + captured.err
    first = read_metrics(tmp_path / "run")[0]
    assert first["step"] == 0
    for name in ("accuracy", "loss", "score", "margin"):
        assert first[f"eval/{name}"] == pytest.approx(summary[name], rel=1e-4)


def held_out(rows):
    """The rows that are to be held out: half of them, those of the first prompts by digest. Each has another prompt."""
    return first_by_digest(rows, len(rows) // 2)
