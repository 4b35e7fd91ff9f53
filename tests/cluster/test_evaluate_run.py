"""A model is measured on an environment without training: the command, its files, and that failures are counted."""

import json
from pathlib import Path

import pytest
import yaml

from rlhf_ray.cli.stage import evaluate
from rlhf_ray.config.load import load
from rlhf_ray.config.stages import EvaluateConfig
from rlhf_ray.observability.sample_choice import Choice
from rlhf_ray.observability.sample_view import samples_of
from tests.chat_templates import make_chat_tokenizer
from tests.cluster.processes import descendants
from tests.models import make_tiny_llama

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
STOPS = list(range(30, 110))
"""Of a random model's tokens, one in six ends a turn."""
WORLD = """
class Failing:
    def reset(self, row, seed):
        if row["number"] % 3 == 1:
            raise ValueError("this row has no world")
        self.row = row
        return {"messages": [{"role": "user", "content": f"say {row['number']}"}]}

    def step(self, reply):
        return {"messages": [], "reward": 1 - self.row["number"] % 3 / 2, "done": True}
"""


def test_episodes_are_measured_without_learners_and_failures_stay_in_the_denominator(shared_ray, tmp_path, capsys):
    model = make_tiny_llama(tmp_path / "model", 448, positions=512)
    make_chat_tokenizer(model, "qwen2.5")
    (tmp_path / "world.py").write_text(WORLD)
    (tmp_path / "p.jsonl").write_text("".join(f'{{"prompt": "q", "number": {i}}}\n' for i in range(9)))
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump({
        "model": {"path": "a-model-that-is-not-here"}, "prompts": {"path": str(tmp_path / "p.jsonl")},
        "environments": {"w": {"path": f"{tmp_path}/world.py:Failing", "max_tokens": 256,
                               "on_failure": {"environment": "quarantine", "overflow": "zero"}}},
        "algorithm": {"estimator": "grpo"}, "coordinator": {"samples_per_prompt": 4},
        "cluster": {"dashboard": False, "object_store_mb": 128, "start_timeout_s": 200},
        "generator": {"chunk": 4, "kv_cache_mb": 8, "max_sequences": 8,
                      "sampling": {"max_tokens": 40, "stop_token_ids": STOPS}},
        "pools": {"default": {"cpus": 4}}, "run": {"steps": 3, "dir": "runs/trained", "auto_resume": True},
    }))
    place = tmp_path / "evaluated"
    evaluate([str(model), str(tmp_path / "grpo.yaml"), "--prompts.max_tokens=64"], directory=place)
    assert descendants() == []

    metrics = json.loads((place / "evaluation.json").read_text())["metrics"]
    samples = samples_of(place, Choice())
    by_row = {sample.key[1]: sample for sample in samples}
    assert sorted(by_row) == list(range(9)), "without rows that are held out all prompts are taken, once each"
    for row, sample in by_row.items():
        if row % 3 == 1:
            assert (sample.cause, sample.use, sample.score) == ("error_environment", "mask", None)
            assert "this row has no world" in sample.error
        elif sample.cause == "completed":
            assert sample.score == 1 - row % 3 / 2
        assert sample.advantage is None
    solved = sum(sample.score == 1.0 for sample in samples)
    scores = [sample.score for sample in samples if sample.score is not None]
    assert solved and (metrics["failed"], metrics["responses"], metrics["solved"]) == (3, 9, solved / 9)
    assert metrics["reward"] == pytest.approx(sum(scores) / 6)
    assert json.loads((place / "summary.json").read_text())["solved"] == metrics["solved"]
    shown = capsys.readouterr().out
    assert "9 of 9 samples to go" in shown and "error_environment 3" in shown and "best 1" in shown
    assert not (place / "model").exists() and not (place / "checkpoints").exists()
    saved = load(EvaluateConfig, Path(place, "config.yaml"), [])
    assert saved.model.path == str(model) and "algorithm" not in yaml.safe_load(Path(place, "config.yaml").read_text())
