"""Adapters learn: a lower held-out loss from demonstrations, a higher gold score from PPO, beside a base that stays."""

import json

import pytest
from safetensors.torch import load_file

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig, SFTConfig
from rlhf_ray.data.synthetic_reviews import make_reviews
from rlhf_ray.stages import ppo, sft

pytestmark = pytest.mark.slow


def test_demonstrations_of_another_kind_are_learned_by_adapters(finished_quickstart, tmp_path):
    directory, _ = finished_quickstart(0)
    turned = [f"{review.continuation.strip()} {review.opening}" for review in make_reviews(2000, seed=7)]
    (tmp_path / "turned.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in turned))
    settings = [f"--model.path={directory}/sft/model", f"--data.path={tmp_path}/turned.jsonl", "--data.text=text",
                "--data.max_tokens=96", "--learner.lora.rank=16", "--pools.default.cpus=2"]

    def held_out_loss(name, *more):
        return sft.run(load(SFTConfig, None, [f"--run.dir={tmp_path}/{name}", *settings, *more]))["loss"]

    before = held_out_loss("before", "--run.steps=1", "--learner.optimizer.learning_rate=1e-12")
    after = held_out_loss("after", "--run.steps=60", "--learner.optimizer.learning_rate=2e-3")
    assert before > 3 and after < 2


def test_ppo_with_adapters_pleases_a_judge_it_was_not_trained_on(finished_quickstart, tmp_path):
    directory, _ = finished_quickstart(0)
    paths = {"model.path": "sft/model", "rewards.preference.path": "reward_model/model",
             "prompts.path": "data/prompts.jsonl", "evaluation.prompts": "data/eval_prompts.jsonl"}
    overrides = [f"--{field}={directory}/{path}" for field, path in paths.items()]
    config = load(PPOConfig, "configs/examples/lora_ppo.yaml", [*overrides, f"--run.dir={tmp_path}/run"])
    summary = ppo.run(config)
    assert summary["gold_before"] < 0.3 and summary["gold_after"] >= 0.7 and summary["kl"] <= 9
    base = load_file(directory / "sft/model/model.safetensors")
    adapters = load_file(tmp_path / "run/adapter/adapter_model.safetensors")
    assert sum(t.numel() for t in adapters.values()) < 0.2 * sum(t.numel() for t in base.values())
