"""On the quickstart's task: pretraining text keeps what the model knew; one backbone learns as policy and critic."""

import json
from pathlib import Path

import pytest
import torch

from rlhf_ray.stages import ppo, quickstart

pytestmark = pytest.mark.slow
STEPS, HELD_OUT = 16, 600
"""Optimizer steps end well before the reward's ceiling; the last texts are left to measure with."""


def mean_loss(model_directory: Path, texts: list[str]) -> float:
    """Nats per token of the texts under an exported model, by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    model = AutoModelForCausalLM.from_pretrained(model_directory).eval()
    losses = []
    with torch.no_grad():
        for text in texts:
            tokens = torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
            every = model(tokens[None]).logits[0, :-1].log_softmax(-1)
            losses.append(-every.gather(1, tokens[1:, None])[:, 0])
    return float(torch.cat(losses).mean())


SHARED = ["--critic.backbone=policy", "--algorithm.old_logprobs=policy", "--critic.cpus=0.1",
          "--critic.micro_batch_tokens=4096", "--critic.optimizer.learning_rate=9e-6"]
"""One model is policy and critic: its own pass gives old log-probabilities and values. Defaults take the place of the
recipe's critic, which is not started."""


def trained(directory: Path, run: Path, overrides: list[str]) -> dict[str, float]:
    """Summary of a PPO run from the quickstart's models."""
    config = quickstart.RECIPE.config("ppo", directory, 0, [
        f"--run.dir={run}", f"--run.steps={STEPS}", "--evaluation.limit=256", *overrides])
    return ppo.run(config)


def test_text_in_the_update_keeps_its_loss_low_at_a_like_reward(finished_quickstart, tmp_path):
    directory, _ = finished_quickstart(0)
    path = directory / "data/sft.jsonl"
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    read = [f"--ptx.path={path}", f"--ptx.limit={len(texts) - HELD_OUT}", "--ptx.max_tokens=96"]
    gold, loss = {}, {"sft": mean_loss(directory / "sft/model", texts[-HELD_OUT:])}
    for coef in (0.0, 0.05, 0.5):
        summary = trained(directory, tmp_path / str(coef), [*read, f"--ptx.coef={coef}"])
        gold[coef], loss[coef] = summary["gold_after"], mean_loss(tmp_path / str(coef) / "model", texts[-HELD_OUT:])
    print(gold, loss)
    forgotten = {coef: loss[coef] - loss["sft"] for coef in gold}
    assert forgotten[0.05] < 0.95 * forgotten[0.0] and gold[0.05] > gold[0.0] - 0.03
    assert forgotten[0.5] < 0.5 * forgotten[0.0] and gold[0.5] > 0.5  # 0.23 of it and 0.69, from 0.15


def test_one_backbone_learns_as_policy_and_critic(finished_quickstart, tmp_path):
    directory, _ = finished_quickstart(0)
    summary = trained(directory, tmp_path / "shared", SHARED)
    print(summary)
    assert summary["gold_after"] > summary["gold_before"] + 0.45  # 0.10 and 0.72; a critic of its own reaches 0.9
