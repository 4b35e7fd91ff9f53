"""PPO with TRL's own trainer, on the models and prompts and with the numbers that one JSON file names.

Run by the interpreter of an environment that holds TRL (see `environment`): `python trl_run.py SETTINGS LINE`. Writes
`updates.json` and the tuned policy (`model/`) into the directory of the settings.

TRL gets what is fastest for it: one forward and backward pass a mini-batch, fused AdamW, float32 without autocast, no
gradient checkpointing, no samples or evaluations in between, nothing logged but its own numbers.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from pacing import Pacing
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer


class Paced(TrainerCallback):
    """Takes turns, and keeps TRL's own numbers of each update."""

    def __init__(self, pacing: Pacing) -> None:
        self.pacing = pacing
        self.rows: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        """One row an update."""
        self.rows.append({name: logs[name] for name in ("objective/kl", "objective/scores", "lr") if name in logs})

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The end of an update."""
        self.pacing.updated()


def main() -> None:
    """Train, write."""
    settings, pacing = json.loads(Path(sys.argv[1]).read_text()), Pacing(int(sys.argv[2]))
    torch.set_num_threads(settings["threads"])
    paced = Paced(pacing)
    trainer = build(settings, paced)
    trainer.train()
    directory = Path(settings["directory"])
    trainer.policy_model.save_pretrained(directory / "model")
    trainer.processing_class.save_pretrained(directory / "model")
    (directory / "updates.json").write_text(json.dumps(paced.rows))


def build(settings: dict[str, Any], callback: TrainerCallback) -> PPOTrainer:
    """TRL's trainer with the settings of our run."""
    tokenizer = AutoTokenizer.from_pretrained(settings["policy"], padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(settings["policy"], dtype=torch.float32)
    torch.manual_seed(settings["seed"])
    critic = AutoModelForSequenceClassification.from_pretrained(settings["policy"], num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(critic.score.weight, std=(critic.config.hidden_size + 1) ** -0.5)  # as our critic's
    return PPOTrainer(
        arguments(settings), tokenizer, model=policy,
        ref_model=AutoModelForCausalLM.from_pretrained(settings["policy"], dtype=torch.float32),
        reward_model=AutoModelForSequenceClassification.from_pretrained(settings["reward_model"], dtype=torch.float32),
        value_model=critic, train_dataset=prompts(settings, tokenizer),
        eval_dataset=prompts(settings, tokenizer).select(range(settings["batch"])),  # asked for, never used
        optimizers=optimizers(settings, policy, critic), callbacks=[callback],
    )


def arguments(settings: dict[str, Any]) -> PPOConfig:
    """TRL's options. Batch and mini-batches: accumulation over mini-batches would make one optimizer step of four."""
    return PPOConfig(
        output_dir=settings["directory"], seed=settings["seed"], use_cpu=True, bf16=False,
        gradient_checkpointing=False, report_to=[], save_strategy="no", eval_strategy="no", disable_tqdm=True,
        logging_steps=1, num_sample_generations=0, local_rollout_forward_batch_size=settings["batch"],
        per_device_train_batch_size=settings["batch"], gradient_accumulation_steps=1,
        num_mini_batches=settings["mini_batches"], num_ppo_epochs=settings["epochs"],
        total_episodes=settings["updates"] * settings["batch"], response_length=settings["response_tokens"],
        stop_token="eos", missing_eos_penalty=None, temperature=settings["temperature"],
        whiten_rewards=False, kl_coef=settings["kl_coef"], kl_estimator="k1", cliprange=settings["clip"],
        cliprange_value=settings["value_clip"], gamma=settings["gamma"], lam=settings["lam"],
    )


def optimizers(
    settings: dict[str, Any], policy: PreTrainedModel, critic: PreTrainedModel
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Fused AdamW with a learning rate each for policy and critic. TRL moves the schedule once an update."""
    shared = {key: settings["optimizer"][key] for key in ("betas", "eps", "weight_decay")}
    optimizer = torch.optim.AdamW(
        [{"params": list(policy.parameters()), "lr": settings["policy_rate"]},
         {"params": list(critic.parameters()), "lr": settings["critic_rate"]}], fused=True, **shared)
    last, lowest = max(1, settings["updates"] - 1), settings["policy_min_ratio"]

    def decay(update: int) -> float:
        return lowest + (1 - lowest) * max(0.0, 1 - update / last)

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, [decay, lambda _: 1.0])


def prompts(settings: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """The prompts' token ids."""
    rows = map(json.loads, Path(settings["prompts"]).read_text().splitlines())
    tokens = tokenizer([row["prompt"] for row in rows], add_special_tokens=False)["input_ids"]
    return Dataset.from_dict({"input_ids": tokens})


if __name__ == "__main__":
    main()
