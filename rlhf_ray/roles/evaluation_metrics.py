"""What an evaluation says of held-out responses, and how it tells repetition."""

import hashlib
from collections.abc import Mapping

import numpy as np

from rlhf_ray.algorithms.pass_at_k import mean_pass_at_k
from rlhf_ray.records import EvaluationPart


def stable_hash(text: str) -> int:
    """63-bit digest of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def bigram_codes(tokens: np.ndarray) -> np.ndarray:
    """One int64 per pair of neighbouring tokens, equal for equal pairs."""
    wide = tokens.astype(np.int64)
    return wide[:-1] * 2**31 + wide[1:]


def summarise(parts: list[EvaluationPart], policy_itself: bool = True) -> dict[str, float]:
    """Means over all responses.

    The KL is told where responses come from the policy's own distribution (`policy_itself`): it is a mean of log policy
    - log reference over samples of the policy. Over samples of another distribution (greedy, truncated, at another
    temperature) the same mean estimates nothing. Perplexity is under the reference: exp of minus the mean
    log-probability per response token. `distinct` is the share of different responses, `distinct_bigrams` that of
    different pairs of neighbouring tokens among all pairs. `reward/NAME` is a component of the
    reward before its weight.
    """
    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    lengths, digests, bigrams = joined("lengths"), joined("digests"), joined("bigrams")
    metrics = {
        "reward": float(joined("scores").mean()),
        **({"kl": float(joined("kl").mean())} if policy_itself else {}),
        "perplexity": float(np.exp(-joined("reference_logprobs").sum() / lengths.sum())),
        "length": float(lengths.mean()),
        "finished": float(joined("finished").mean()),
        "distinct": len(np.unique(digests)) / len(digests),
        "distinct_bigrams": len(np.unique(bigrams)) / max(1, len(bigrams)),
        "responses": float(len(lengths)),
    }
    metrics |= {f"reward/{name}": float(np.concatenate([part.components[name] for part in parts]).mean())
                for name in parts[0].components}
    return metrics if parts[0].gold is None else {**metrics, "gold": float(joined("gold").mean())}


def pass_rates(parts: list[EvaluationPart], solved_at: Mapping[str, float]) -> dict[str, float]:
    """`pass@k/NAME` for the components of the reward named in `solved_at`, k = 1, 2, 4, ... up to the samples a prompt
    has. A response has solved its prompt when the component's score is at least the number there."""
    _, prompts = np.unique(np.concatenate([part.rows for part in parts]), return_inverse=True)
    rates: dict[str, float] = {}
    for name, threshold in solved_at.items():
        # Scores are float32: so must the threshold be, or 0.7 would never reach 0.7.
        solved = np.concatenate([part.components[name] for part in parts]) >= np.float32(threshold)
        counts = zip(np.bincount(prompts).tolist(), np.bincount(prompts, weights=solved).astype(int).tolist(),
                     strict=True)
        rates |= {f"pass@{k}/{name}": rate for k, rate in mean_pass_at_k(counts).items()}
    return rates
