"""Supervised losses: of demonstrations, of preference pairs and of step labels."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_ray.algorithms.logprobs import token_logprobs
from rlhf_ray.algorithms.masking import masked_mean, select, wide
from rlhf_ray.errors import ConfigError, DataError

IGNORE = -100
"""Label of positions that a loss leaves out (PyTorch's convention)."""


def lm_loss(logits: Tensor, labels: Tensor, ignore: int = IGNORE) -> Tensor:
    """Mean cross-entropy over labels other than `ignore`, in nats a token; 0 when there are none.

    Labels are aligned with the logits: `logits[b, t]` predicts `labels[b, t]`. Nothing is shifted in here (packed
    rows have to be shifted per sequence, where the boundaries are known).

    Args:
        logits: `[B, T, V]` (or any `[..., V]`); they may hold anything, NaN included, at ignored labels.
        labels: `[B, T]` integers in [0, V), or `ignore`.
    """
    counted = labels != ignore
    return -masked_mean(token_logprobs(logits, labels.masked_fill(~counted, 0)), counted)


def pairwise_loss(
    chosen: Tensor,
    rejected: Tensor,
    margin: Tensor | float | None = None,
    kind: Literal["sigmoid", "logexp"] = "sigmoid",
) -> Tensor:
    """Reward model's loss on preference pairs (Bradley and Terry 1952; Stiennon et al. 2020), mean over pairs.

    sigmoid: -log sigmoid(chosen - rejected - margin); logexp: log(1 + exp(rejected - chosen + margin)) (Bai et al.
    2022). Both are the same function; logexp is the name in some publications.

    Args:
        chosen, rejected: `[B]` scores.
        margin: `[B]` or a number: how far apart the pair should be (Touvron et al. 2023); none when empty.

    Raises:
        ConfigError: an unknown kind.
    """
    distance = wide(chosen) - wide(rejected) - (0.0 if margin is None else margin)
    if kind == "sigmoid":
        losses = -logsigmoid(distance)
    elif kind == "logexp":
        losses = torch.logaddexp(torch.zeros_like(distance), -distance)
    else:
        raise ConfigError(f'pairwise loss of kind {kind!r} is unknown; use "sigmoid" or "logexp"')
    return losses.sum() / max(losses.numel(), 1)


def process_reward_loss(
    logits: Tensor, labels: Tensor, placeholder_mask: Tensor, reward_token_ids: list[int] | None = None
) -> Tensor:
    """Cross-entropy of step labels, read off the logits *at* the placeholder tokens (Lightman et al. 2023).

    The distribution is over the whole vocabulary, or over `reward_token_ids` alone when given. Hard labels (integers)
    are token ids. With `reward_token_ids` they may also be positions in that list, as long as no id could be taken
    for a position. Soft labels (floats, Wang et al. 2024) are the probability of the first of exactly two
    `reward_token_ids`. A label of -100 leaves its placeholder out.

    Args:
        logits: `[B, T, V]`.
        labels: `[B, T]`, read at placeholders only.
        placeholder_mask: `[B, T]` bool, True where a step ends and its label is predicted.

    Returns:
        Mean over labelled placeholders; 0 when there are none.

    Raises:
        ConfigError: soft labels without exactly two reward_token_ids.
        DataError: a hard label that is no reward token, or a soft one outside [0, 1].
    """
    logits, labels = logits[placeholder_mask], labels[placeholder_mask]
    if reward_token_ids is not None:
        logits = logits[:, reward_token_ids]
    if labels.is_floating_point():
        return _soft_label_loss(logits, labels, reward_token_ids)
    if reward_token_ids is not None:
        labels = _class_indices(labels, reward_token_ids)
    return lm_loss(logits, labels)


def _soft_label_loss(logits: Tensor, labels: Tensor, reward_token_ids: list[int] | None) -> Tensor:
    """Binary cross-entropy of `[P, 2]` logits with the probability of the first; IGNORE leaves a row out."""
    if reward_token_ids is None or len(reward_token_ids) != 2:
        raise ConfigError(f"soft labels need exactly two reward_token_ids, got {reward_token_ids}; give (good, bad)")
    counted = labels != IGNORE
    targets = select(labels, counted)
    if not ((targets >= 0) & (targets <= 1)).all():
        raise DataError(f"soft labels are probabilities, got {labels[counted].tolist()[:8]}; rescale them to [0, 1]")
    good, bad = wide(logits[:, 0]), wide(logits[:, 1])
    margin = select(good - bad, counted)
    return -masked_mean(targets * logsigmoid(margin) + (1 - targets) * logsigmoid(-margin), counted)


def _class_indices(labels: Tensor, reward_token_ids: list[int]) -> Tensor:
    """Labels `[P]` as positions in `reward_token_ids`; IGNORE stays."""
    ids = torch.tensor(reward_token_ids, device=labels.device)
    matches = labels[:, None] == ids
    positions = matches.int().argmax(-1)
    known = matches.any(-1) | (labels == IGNORE)
    if min(reward_token_ids) >= len(reward_token_ids):
        known |= (labels >= 0) & (labels < len(ids))
    if not known.all():
        strange = labels[~known].unique().tolist()[:8]
        raise DataError(f"labels {strange} are not in reward_token_ids={reward_token_ids}; relabel the steps, or add "
                        "the ids to the list")
    return torch.where(matches.any(-1), positions, labels)
