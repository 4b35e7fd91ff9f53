"""Write `batch.json` and one file of numbers for each public implementation that can be imported.

Their functions run on one fixed random masked batch; what they answer is saved, none of their code. Install them into
an environment of their own and run this file in it:

    pip install trl==1.12.0 verl==0.9.1 torch numpy omegaconf tensordict torchdata codetiming hydra-core ray orjson \
        pandas pylatexenc peft torchao==0.10.0
    pip install --no-deps openrlhf==0.11.2 torchtune==0.6.1
    python tests/golden/make_golden.py

A package that is not there is skipped and its file left as it is.
"""

import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
GAMMA, LAM, LOW, HIGH, DUAL, VALUE_CLIP, COEF, CAP = 0.95, 0.9, 0.2, 0.28, 2.0, 0.3, 0.1, 1.2
Entry = tuple[str, str, Any, str]
"""Name, function that answered, its answer, note on conventions ("" where they are ours)."""


def fixed_batch() -> dict[str, torch.Tensor]:
    """Six responses of up to five tokens, of two prompts; float64, zeros outside the mask."""
    g = torch.Generator().manual_seed(20250101)
    lengths = torch.tensor([5, 3, 1, 4, 5, 2])
    mask = torch.arange(5) < lengths[:, None]
    gapped = mask & ~torch.tensor([[0, 1, 1, 0, 0], [0] * 5, [0] * 5, [0, 0, 1, 0, 0], [0] * 5, [0] * 5]).bool()

    def column(scale: float, shift: float = 0.0) -> torch.Tensor:
        return (scale * torch.randn(6, 5, generator=g, dtype=torch.float64) + shift) * mask

    old = column(0.4, -2.0)
    return {
        "mask": mask, "gapped": gapped, "groups": torch.tensor([0, 1, 0, 1, 1, 1]),
        "scores": torch.randn(6, generator=g, dtype=torch.float64), "old": old, "new": old + column(0.9),
        "reference": old + column(0.3), "behaviour": old + column(0.2), "values": column(1.0), "rewards": column(0.5),
        "old_values": column(1.0), "returns": column(1.0), "advantages": column(1.0),
        "row_advantages": torch.randn(6, 1, generator=g, dtype=torch.float64) * mask,
        "logits": torch.randn(6, 5, 7, generator=g, dtype=torch.float64),
        "tokens": torch.randint(7, (6, 5), generator=g),
    }


def trl(b: dict[str, torch.Tensor]) -> Iterator[Entry]:
    """TRL's functions, and the loss of its GRPO trainer with the log-probabilities given."""
    from trl.experimental.ppo.ppo_trainer import masked_whiten
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    yield "whiten", "experimental.ppo.ppo_trainer.masked_whiten", masked_whiten(b["rewards"], b["mask"]), (
        "not zeroed outside the mask; ours is")
    yield "logprobs", "trainer.utils.selective_log_softmax", selective_log_softmax(b["logits"], b["tokens"]), ""
    yield "entropy", "trainer.utils.entropy_from_logits", entropy_from_logits(b["logits"]), ""
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "grpo_loss": ({}, "sequence aggregation"),
        "grpo_loss_token": ({"loss_type": "bnpo"}, "token aggregation"),
        "grpo_loss_kl": ({"beta": COEF}, "k3 in the loss"),
        "gspo_loss": ({"importance_sampling_level": "sequence"}, "one advantage a row; for several ours is GSPO-token"),
        "grpo_loss_truncated": ({"use_vllm": True}, "the weight, cut at the cap, is handed in as its trainer makes it"),
    }
    for name, (changes, note) in cases.items():
        yield name, "trainer.grpo_trainer.GRPOTrainer._compute_loss", _grpo_loss(GRPOTrainer, b, **changes), note


def _grpo_loss(trainer: type, b: dict[str, torch.Tensor], **changes: Any) -> torch.Tensor:
    settings: dict[str, Any] = {
        "loss_type": "grpo", "importance_sampling_level": "token", "beta": 0.0, "use_vllm": False,
        "vllm_importance_sampling_correction": True, "epsilon_low": LOW, "epsilon_high": HIGH,
        "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "_entropy_bonus_enabled": False,
        "aux_loss_enabled": False, "current_gradient_accumulation_steps": 1, "max_completion_length": 5, **changes,
    }
    fake = SimpleNamespace(
        **settings, args=SimpleNamespace(delta=None, use_bias_correction_kl=False),
        model=SimpleNamespace(training=True), _metrics=_Anything(), accelerator=_Anything(),
        _get_per_token_logps_and_entropies=lambda *_, **__: (b["new"], torch.zeros_like(b["new"]), None),
    )
    ids = torch.ones(6, 5, dtype=torch.long)
    return trainer._compute_loss(fake, None, {  # type: ignore[attr-defined]
        "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": b["mask"].double(),
        "advantages": b["row_advantages"], "old_per_token_logps": b["old"], "ref_per_token_logps": b["reference"],
        "importance_sampling_ratio": (b["old"] - b["behaviour"]).exp().clamp(max=CAP),
    })


class _Anything:
    """Stands for a trainer's logging, which the loss does not depend on."""

    def __getattr__(self, name: str) -> "_Anything":
        return self

    def __getitem__(self, key: Any) -> "_Anything":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and isinstance(args[0], torch.Tensor) else self


def verl(b: dict[str, torch.Tensor]) -> Iterator[Entry]:
    """verl.trainer.ppo.core_algos."""
    from verl.trainer.ppo import core_algos as core

    mask, index, whole = b["mask"].double(), b["groups"].numpy(), b["rewards"]
    whitened = "advantages come whitened, and not zeroed outside the mask; ours are whitened later, over the batch"
    for name, m in (("gae", mask), ("gae_gapped", b["gapped"].double())):
        found = core.compute_gae_advantage_return(whole * m, b["values"], m, GAMMA, LAM)
        yield f"{name}_whitened", "compute_gae_advantage_return", found[0], whitened
        yield f"{name}_returns", "compute_gae_advantage_return", found[1], "not zeroed outside the mask; ours are"
        found = core.compute_reinforce_plus_plus_outcome_advantage(whole * m, m, SimpleNamespace(gamma=GAMMA))
        name = name.replace("gae", "reinforce_pp")
        yield f"{name}_whitened", "compute_reinforce_plus_plus_outcome_advantage", found[0], ""
        yield f"{name}_returns", "compute_reinforce_plus_plus_outcome_advantage", found[1], ""
    yield "grpo", "compute_grpo_outcome_advantage", core.compute_grpo_outcome_advantage(whole, mask, index)[0], (
        "sums of token rewards are compared, ours too")
    yield "dr_grpo", "compute_grpo_outcome_advantage", core.compute_grpo_outcome_advantage(
        whole, mask, index, norm_adv_by_std_in_grpo=False)[0], ""
    yield "rloo", "compute_rloo_outcome_advantage", core.compute_rloo_outcome_advantage(whole, mask, index)[0], ""
    yield "reinforce_baseline_whitened", "compute_reinforce_plus_plus_baseline_outcome_advantage", (
        core.compute_reinforce_plus_plus_baseline_outcome_advantage(whole, mask, index)[0]), (
        "always whitened, undiscounted, and sums of token rewards are compared: ours with penalties of 0, gamma 1 and "
        "whiten on")
    for estimator in ("k1", "k2", "k3", "abs"):
        yield f"kl_{estimator}", "kl_penalty", core.kl_penalty(b["new"], b["reference"], estimator), (
            "k3 is cut at 10, k1 of more than 20 too: the batch stays within; ours is never cut")
    yield from _verl_losses(core, b, mask)
    yield "adaptive_kl", "AdaptiveKLController", _controlled(core.AdaptiveKLController(0.2, 6.0, 1000)), ""


def _verl_losses(core: ModuleType, b: dict[str, torch.Tensor], mask: torch.Tensor) -> Iterator[Entry]:
    from verl.workers.config.actor import ActorConfig

    actor = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=LOW,
                        clip_ratio_low=LOW, clip_ratio_high=HIGH, clip_ratio_c=DUAL)
    weights = (b["old"] - b["behaviour"]).exp().clamp(max=CAP)
    for aggregate, mode in (("token", "token-mean"), ("sequence", "seq-mean-token-mean")):
        for name, w in (("policy_loss_dual", None), ("policy_loss_dual_truncated", weights)):
            yield f"{name}_{aggregate}", "compute_policy_loss_vanilla", core.compute_policy_loss_vanilla(
                b["old"], b["new"], b["advantages"], mask, mode, actor, w)[0], (
                "dual clip is always on; the importance weight, cut at the cap, is handed in")
        yield f"gspo_{aggregate}", "compute_policy_loss_gspo", core.compute_policy_loss_gspo(
            b["old"], b["new"], b["advantages"], mask, mode, actor)[0], "GSPO-token, as ours"
    yield "value_loss", "compute_value_loss", core.compute_value_loss(
        b["values"], b["returns"], b["old_values"], mask, VALUE_CLIP)[0], ""


def torchtune(b: dict[str, torch.Tensor]) -> Iterator[Entry]:
    """torchtune.rlhf."""
    from torchtune import rlhf
    from torchtune.rlhf.loss import PPOLoss

    yield "whiten", "rlhf.whiten", rlhf.whiten(b["rewards"], b["mask"], shift_mean=False), (
        "its shift_mean is the other way about: False leaves a mean of zero; not zeroed outside the mask")
    found = rlhf.estimate_advantages(b["values"].clone(), b["rewards"], GAMMA, LAM, b["mask"])
    yield "gae_whitened", "rlhf.estimate_advantages", found[0], (
        "adds the mean back after whitening, so advantages keep it; ours have a mean of zero")
    yield "gae_returns", "rlhf.estimate_advantages", found[1], "needs values that are 0 outside the mask; ours does not"
    loss = PPOLoss(epsilon=LOW, value_clip_range=VALUE_CLIP)(
        b["old"], b["new"], b["advantages"], b["old_values"], b["values"], b["returns"], b["mask"], b["mask"])
    yield "policy_loss", "rlhf.loss.PPOLoss", loss[1], "one epsilon for both clips"
    yield "value_loss", "rlhf.loss.PPOLoss", loss[2], ""
    rewards = rlhf.get_rewards_ppo(b["scores"], b["new"], b["reference"], COEF, b["mask"].long().sum(-1) - 1)
    yield "token_rewards", "rlhf.get_rewards_ppo", rewards[0] * b["mask"], "masked here; k1 alone"


def openrlhf(b: dict[str, torch.Tensor]) -> Iterator[Entry]:
    """OpenRLHF's losses and rewards, without the package around them, or the engine that they import and do not use."""
    root = Path(str(importlib.util.find_spec("openrlhf").submodule_search_locations[0]))  # type: ignore
    package = ModuleType("openrlhf.models")
    package.__path__ = [str(root / "models")]
    sys.modules["openrlhf.models"] = package
    sys.modules.setdefault("deepspeed", ModuleType("deepspeed"))
    from openrlhf.models.loss import LogExpLoss, PairWiseLoss, PolicyLoss, ValueLoss
    from openrlhf.models.utils import compute_approx_kl, compute_reward
    from openrlhf.trainer.ppo_utils.kl_controller import AdaptiveKLController

    mask = b["mask"].double()
    for estimator in ("k1", "k2", "k3"):
        yield f"kl_{estimator}", "models.utils.compute_approx_kl", compute_approx_kl(
            b["new"], b["reference"], kl_estimator=estimator), "cut at 10, in float32; ours is never cut"
    yield "token_rewards_clipped", "models.utils.compute_reward", compute_reward(
        b["scores"], COEF, b["new"] - b["reference"], mask, (-0.5, 0.5)), ""
    options: dict[str, dict[str, Any]] = {
        "policy_loss_token": {}, "policy_loss_sequence": {"token_level_loss": False},
        "policy_loss_dual_token": {"dual_clip": DUAL}, "gspo_rows": {"policy_loss_type": "gspo"},
        "policy_loss_truncated_token": {"is_correction_level": "token", "is_correction_mode": "clip",
                                        "is_correction_threshold": (0.0, CAP)},
        "policy_loss_masked_token": {"is_correction_level": "token", "is_correction_mode": "mask",
                                     "is_correction_threshold": (0.0, CAP)},
    }
    for name, o in options.items():
        advantages = b["row_advantages" if name == "gspo_rows" else "advantages"]
        loss = PolicyLoss(LOW, HIGH, **o)(b["new"], b["old"], advantages, mask, b["behaviour"])[0]
        note = "it can bound importance weights from below too; here by 0" if "is_correction_level" in o else ""
        yield name, "models.loss.PolicyLoss", loss, note
    yield "value_loss", "models.loss.ValueLoss", ValueLoss(VALUE_CLIP)(
        b["values"], b["old_values"], b["returns"], mask), ""
    yield "adaptive_kl", "trainer.ppo_utils.kl_controller", _controlled(AdaptiveKLController(0.2, 6.0, 1000)), ""
    chosen, rejected = b["scores"][:3], b["scores"][3:]
    yield "pairwise", "models.loss.PairWiseLoss", PairWiseLoss()(chosen, rejected), ""
    yield "logexp", "models.loss.LogExpLoss", LogExpLoss()(chosen, rejected), ""


def _controlled(controller: Any) -> list[float]:
    """The coefficient after each of some observations, on both sides of the target and of the clip."""
    values = []
    for observed in (12.0, 6.5, 5.9, 1.0, 6.0):
        controller.update(observed, 256)
        values.append(float(controller.value))
    return values


def write(name: str, entries: Callable[[dict[str, torch.Tensor]], Iterator[Entry]]) -> None:
    """One package's numbers."""
    if importlib.util.find_spec(name) is None:
        print(f"{name}: not installed, left as it is")
        return
    numbers = {
        key: {"function": function, "note": note, "value": value if isinstance(value, list) else value.tolist()}
        for key, function, value, note in entries({k: v.clone() for k, v in fixed_batch().items()})
    }
    found = {"package": name, "version": importlib.metadata.version(name), "numbers": numbers}
    (HERE / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"{name}: {len(numbers)} numbers")


if __name__ == "__main__":
    np.random.seed(0)
    batch = {name: column.tolist() for name, column in fixed_batch().items()}
    (HERE / "batch.json").write_text(json.dumps(batch) + "\n")
    for package_name, run in (("trl", trl), ("verl", verl), ("torchtune", torchtune), ("openrlhf", openrlhf)):
        write(package_name, run)
