"""Metrics of an evaluation's responses: means, pass@k, and measures of repetition."""

import hashlib
import math
from collections.abc import Mapping

import numpy as np

from rlhf_ray.algorithms.pass_at_k import mean_pass_at_k
from rlhf_ray.records import EvaluationPart
from rlhf_ray.roles.episode_numbers import episode_metrics


def stable_hash(text: str) -> int:
    """63-bit hash of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def bigram_codes(tokens: np.ndarray) -> np.ndarray:
    """One int64 per pair of adjacent tokens, equal for equal pairs."""
    wide = tokens.astype(np.int64)
    return wide[:-1] * 2**31 + wide[1:]


def summarise(parts: list[EvaluationPart], on_policy: bool = True) -> dict[str, float]:
    """Means over all responses.

    The KL is included only if responses were sampled from the policy's own distribution (`on_policy`): it is the mean
    of log policy - log reference over samples of the policy. Over samples of another distribution (greedy, truncated,
    at another temperature) that mean does not estimate the KL. Perplexity is under the reference: exp of minus the mean
    log-probability per response token, over the tokens that training's sampling keeps if responses were truncated like
    that (`top_k` and others): lower than over all tokens, and comparable only under the same truncation. Both need a
    reference. `distinct` is the fraction of different responses,
    `distinct_bigrams` that of different pairs of adjacent tokens among all pairs. `reward/NAME` is a component of the
    reward before its weight. An episode that failed has no reward, and is in none of these; `failed` counts them.
    """
    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    lengths, digests, bigrams = joined("lengths"), joined("digests"), joined("bigrams")
    referenced = parts[0].reference_logprobs is not None
    scores = joined("scores")
    scored = ~np.isnan(scores)  # a failed episode has no reward
    metrics = {
        "reward": float(scores[scored].mean()) if scored.any() else math.nan,
        **({"kl": float(joined("kl").mean())} if on_policy and referenced else {}),
        **({"perplexity": float(np.exp(-joined("reference_logprobs").sum() / lengths.sum()))} if referenced else {}),
        "length": float(lengths.mean()),
        "finished": float(joined("finished").mean()),
        "distinct": len(np.unique(digests)) / len(digests),
        "distinct_bigrams": len(np.unique(bigrams)) / max(1, len(bigrams)),
        "responses": float(len(lengths)),
    }
    for name in parts[0].components:
        component = np.concatenate([part.components[name] for part in parts])[scored]
        metrics[f"reward/{name}"] = float(component.mean()) if len(component) else math.nan
    if parts[0].episodes:
        metrics["failed"] = float((~scored).sum())
        metrics |= {name.removeprefix("episodes/"): number
                    for name, number in episode_metrics([part.episodes for part in parts]).items()
                    if not name.startswith("episodes/masked")}
    return metrics if parts[0].gold is None else {**metrics, "gold": float(joined("gold")[scored].mean())}


def pass_rates(
    parts: list[EvaluationPart], solved_at: Mapping[str, float], solved_by: str | None = None
) -> dict[str, float]:
    """`pass@k/NAME` for the reward components in `solved_at`, with k = 1, 2, 4, ... up to the number of samples per
    prompt. A response solves its prompt if the component's score is at least the threshold in `solved_at`; an episode
    that failed does not. `solved` is the share of episodes that do by their environment's reward.

    Args:
        solved_by: name of that component; None without environments.
    """
    _, prompts = np.unique(np.concatenate([part.rows for part in parts]), return_inverse=True)
    rates: dict[str, float] = {}
    for name, threshold in solved_at.items():
        # Scores are float32, so the threshold must be, too: otherwise a score of 0.7 would be below 0.7.
        solved = np.concatenate([part.components[name] for part in parts]) >= np.float32(threshold)
        counts = zip(np.bincount(prompts).tolist(), np.bincount(prompts, weights=solved).astype(int).tolist(),
                     strict=True)
        rates |= {f"pass@{k}/{name}": rate for k, rate in mean_pass_at_k(counts).items()}
        if name == solved_by:
            rates["solved"] = float(solved.mean())
    return rates
