"""How far the generators' log-probabilities are from the learner's: a histogram of the gap, and its quantiles.

Quantiles of a batch do not follow from those of its parts; histograms are added.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BINS = 90
"""Of equal width on a logarithmic scale, each up to 1.26 times its lower edge."""
SMALLEST, LARGEST = -7.0, 2.0
"""Decimal logarithms of the outer edges, in nats. The outer bins also count what is beyond them."""


def gap_histogram(logprobs: Tensor, others: Tensor, mask: Tensor) -> Tensor:
    """[BINS] float32 number of True tokens of `mask` by |logprobs - others|, all three of one shape."""
    gaps = (logprobs - others).abs().float().clamp(10**SMALLEST, 10**LARGEST)
    # Outside the histogram's range nothing is counted; the log of the largest gap may round to just above it.
    places = gaps.log10().clamp(max=LARGEST).masked_fill(~mask, LARGEST + 1)
    return torch.histc(places, BINS, SMALLEST, LARGEST)


def gap_quantile(histogram: Sequence[float] | Tensor, share: float) -> float:
    """The gap in nats that at least `share` of the tokens do not exceed: the upper edge of the quantile's bin, at most
    1.26 times the quantile. 0 without tokens.

    Args:
        histogram: [BINS] numbers of tokens, or their shares.
    """
    counts = torch.as_tensor(histogram, dtype=torch.float64)
    if not counts.sum() > 0:
        return 0.0
    reached = counts.cumsum(0) >= share * counts.sum() * (1 - 1e-9)  # shares are rounded
    place = int(reached.int().argmax()) + 1
    return float(10 ** (SMALLEST + (LARGEST - SMALLEST) * place / BINS))
