"""pass@k: the chance that at least one of k samples solves a problem, estimated without bias from n >= k samples."""

from collections.abc import Iterable
from math import comb


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k) for one problem (Chen et al. 2021, "Evaluating Large Language Models Trained on Code",
    eq. 1): one minus the share of k-subsets of the n samples in which none of the c good ones is.

    Whole numbers throughout, so it is exact for any n; 1 - (1 - c/n)^k would be biased.

    Args:
        samples: n, drawn independently from one distribution.
        solved: c, how many of them solved the problem.

    Raises:
        ValueError: not 1 <= k <= n, or not 0 <= c <= n.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs 1 <= k <= samples={samples}")
    if not 0 <= solved <= samples:
        raise ValueError(f"solved={solved} must lie between 0 and samples={samples}")
    return 1.0 - comb(samples - solved, k) / comb(samples, k)


def mean_pass_at_k(counts: Iterable[tuple[int, int]]) -> dict[int, float]:
    """pass@k averaged over problems, for k = 1, 2, 4, ... up to the fewest samples that any problem has.

    Args:
        counts: (samples, solved) of each problem.

    Returns:
        k -> mean; empty without problems.
    """
    problems = list(counts)
    fewest = min((samples for samples, _ in problems), default=0)
    return {k: sum(pass_at_k(n, c, k) for n, c in problems) / len(problems) for k in powers_of_two(fewest)}


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... up to and including `limit`."""
    return [1 << i for i in range(limit.bit_length())]
