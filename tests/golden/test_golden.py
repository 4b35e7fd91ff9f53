"""Our numbers beside those of public implementations, on one fixed random masked batch.

`make_golden.py` says how the numbers came about, each file which package and version gave them, and each number which
function and where its conventions differ from ours (docs/algorithms.md says why). Numbers of tokens are compared at
response tokens: outside the mask ours are 0, whatever others leave there.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_ray.algorithms.advantage_estimators import ScoredResponses, estimate, token_rewards
from rlhf_ray.algorithms.kl import AdaptiveKL, approx_kl
from rlhf_ray.algorithms.logprobs import entropy, token_logprobs
from rlhf_ray.algorithms.losses import pairwise_loss, policy_loss, value_loss
from rlhf_ray.algorithms.masking import aggregate_mean, masked_mean, masked_whiten
from tests.golden.make_golden import CAP, COEF, DUAL, GAMMA, HIGH, LAM, LOW, VALUE_CLIP

HERE = Path(__file__).parent


def as_tensor(column: Any) -> Tensor:
    """Numbers in float64; flags and integers as they are."""
    tensor = torch.tensor(column)
    return torch.tensor(column, dtype=torch.float64) if tensor.is_floating_point() else tensor


BATCH = {name: as_tensor(column) for name, column in json.loads((HERE / "batch.json").read_text()).items()}
FILES = {name: json.loads((HERE / f"{name}.json").read_text()) for name in ("trl", "verl", "torchtune", "openrlhf")}


def b(*names: str) -> tuple[Tensor, ...]:
    return tuple(BATCH[name] for name in names)


MASK = BATCH["mask"]


def responses(mask: Tensor = MASK, gamma: float = GAMMA) -> ScoredResponses:
    """Token rewards of the batch as penalties, and scores of 0."""
    rewards, values, groups = b("rewards", "values", "groups")
    return ScoredResponses(torch.zeros(6, dtype=torch.float64), rewards, mask, groups, values, gamma, LAM)


def advantages(name: str, mask: Tensor = MASK) -> Tensor:
    return estimate(name, responses(mask))[0]


def whitened(name: str, mask: Tensor = MASK) -> Tensor:
    return masked_whiten(advantages(name, mask), mask)


def returns(name: str, mask: Tensor = MASK) -> Tensor:
    return estimate(name, responses(mask))[1]


def baseline_whitened() -> Tensor:
    """The token rewards' sums as scores on the last token, without penalties or discount."""
    sums = responses(gamma=1.0)
    whole = replace(sums, scores=(sums.penalties * MASK).sum(-1), penalties=torch.zeros(6, 5, dtype=torch.float64))
    return masked_whiten(estimate("reinforce_baseline", whole)[0], MASK)


def clipped(aggregate: str = "token", high: float = HIGH, given: str = "advantages", **options: Any) -> Tensor:
    if "is_cap" in options:
        options["behaviour_logprobs"] = BATCH["behaviour"]
    return policy_loss(*b("new", "old", given), MASK, LOW, high, aggregate=aggregate, **options)[0]


def rows(**options: Any) -> Tensor:
    """The loss with one advantage a row, as group estimators give."""
    return clipped("sequence", given="row_advantages", **options)


def squared() -> Tensor:
    return value_loss(*b("values", "old_values", "returns"), MASK, VALUE_CLIP)


def kl(estimator: str) -> Tensor:
    return approx_kl(*b("new", "reference"), estimator)


def rewards(clip: float | None = None) -> Tensor:
    return token_rewards(BATCH["scores"], kl("k1"), MASK, COEF, clip)


def controlled() -> list[float]:
    controller, values = AdaptiveKL(0.2, 6.0, 1000), []
    for observed in (12.0, 6.5, 5.9, 1.0, 6.0):
        controller.update(observed, 256)
        values.append(controller.value)
    return values


def pairs(kind: str) -> Tensor:
    return pairwise_loss(BATCH["scores"][:3], BATCH["scores"][3:], kind=kind)


OURS: dict[str, dict[str, Callable[[], Any]]] = {
    "trl": {
        "whiten": lambda: masked_whiten(BATCH["rewards"], MASK),
        "logprobs": lambda: token_logprobs(*b("logits", "tokens")),
        "entropy": lambda: entropy(BATCH["logits"]),
        "grpo_loss": rows,
        "grpo_loss_token": lambda: clipped(given="row_advantages"),
        "grpo_loss_kl": lambda: rows() + COEF * aggregate_mean(kl("k3"), MASK, "sequence"),
        "gspo_loss": lambda: rows(ratio="sequence"),
        "grpo_loss_truncated": lambda: rows(is_cap=CAP),
    },
    "verl": {
        "gae_whitened": lambda: whitened("gae"),
        "gae_returns": lambda: returns("gae"),
        "gae_gapped_whitened": lambda: whitened("gae", BATCH["gapped"]),
        "gae_gapped_returns": lambda: returns("gae", BATCH["gapped"]),
        "reinforce_pp_whitened": lambda: whitened("reinforce_pp"),
        "reinforce_pp_returns": lambda: returns("reinforce_pp"),
        "reinforce_pp_gapped_whitened": lambda: whitened("reinforce_pp", BATCH["gapped"]),
        "reinforce_pp_gapped_returns": lambda: returns("reinforce_pp", BATCH["gapped"]),
        "grpo": lambda: advantages("grpo"),
        "dr_grpo": lambda: advantages("dr_grpo"),
        "rloo": lambda: advantages("rloo"),
        "reinforce_baseline_whitened": baseline_whitened,
        **{f"kl_{name}": lambda name=name: kl(name) for name in ("k1", "k2", "k3", "abs")},
        **{f"policy_loss_dual_{a}": lambda a=a: clipped(a, dual_clip=DUAL) for a in ("token", "sequence")},
        **{f"policy_loss_dual_truncated_{a}": lambda a=a: clipped(a, dual_clip=DUAL, is_cap=CAP)
           for a in ("token", "sequence")},
        **{f"gspo_{a}": lambda a=a: clipped(a, ratio="sequence") for a in ("token", "sequence")},
        "value_loss": squared,
        "adaptive_kl": controlled,
    },
    "torchtune": {
        "whiten": lambda: masked_whiten(BATCH["rewards"], MASK),
        "gae_whitened": lambda: whitened("gae") + masked_mean(advantages("gae"), MASK),
        "gae_returns": lambda: returns("gae"),
        "policy_loss": lambda: clipped(high=LOW),
        "value_loss": squared,
        "token_rewards": rewards,
    },
    "openrlhf": {
        **{f"kl_{name}": lambda name=name: kl(name) for name in ("k1", "k2", "k3")},
        "token_rewards_clipped": lambda: rewards(0.5),
        **{f"policy_loss_{a}": lambda a=a: clipped(a) for a in ("token", "sequence")},
        "policy_loss_dual_token": lambda: clipped(dual_clip=DUAL),
        "gspo_rows": lambda: rows(ratio="sequence"),
        "policy_loss_truncated_token": lambda: clipped(is_cap=CAP),
        "policy_loss_masked_token": lambda: clipped(is_cap=CAP, importance="mask"),
        "value_loss": squared,
        "adaptive_kl": controlled,
        "pairwise": lambda: pairs("sigmoid"),
        "logexp": lambda: pairs("logexp"),
    },
}


@pytest.mark.parametrize(("package", "name"), [(p, name) for p, file in FILES.items() for name in file["numbers"]])
def test_our_number_is_theirs(package, name):
    theirs = as_tensor(FILES[package]["numbers"][name]["value"])
    ours = as_tensor(OURS[package][name]()) if name == "adaptive_kl" else OURS[package][name]()
    if theirs.shape == MASK.shape and name not in ("logprobs", "entropy"):
        mask = BATCH["gapped"] if "gapped" in name else MASK
        ours, theirs = ours[mask], theirs[mask]
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-7)


def test_every_comparison_has_a_number():
    assert {p: set(names) for p, names in OURS.items()} == {p: set(file["numbers"]) for p, file in FILES.items()}


def test_the_batch_reaches_every_branch():
    ratio, weight = (BATCH["new"] - BATCH["old"]).exp()[MASK], (BATCH["old"] - BATCH["behaviour"]).exp()[MASK]
    up, down = BATCH["advantages"][MASK] > 0, BATCH["advantages"][MASK] < 0
    assert (ratio[up] > 1 + HIGH).any() and (ratio[down] < 1 - LOW).any() and (ratio[down] > DUAL).any()
    assert (weight > 1).any() and (weight < 1).any() and (weight > CAP).any()
    assert ((BATCH["values"] - BATCH["old_values"]).abs() > VALUE_CLIP)[MASK].any()
    assert (MASK.sum(-1) == 1).any() and (BATCH["scores"].abs() > 0.5).any()
