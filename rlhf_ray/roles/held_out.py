"""What an evaluation says of held-out responses, and how it tells repetition."""

import hashlib

import numpy as np

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
