"""Choice of the held-out rows: whole groups, by their digests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.errors import DataError


def group_digest(group: str) -> int:
    """64-bit digest of the text that rows of a group share, such as their prompt."""
    return int.from_bytes(hashlib.blake2b(group.encode(), digest_size=16).digest()[:8])


def held_out_rows(groups: Sequence[str], share: float, source: str = "the data") -> NDArray[np.bool_]:
    """`held_out_digests` of groups given as texts."""
    return held_out_digests(np.array([group_digest(group) for group in groups], dtype=np.uint64), share, source)


def held_out_digests(digests: NDArray[np.uint64], share: float, source: str = "the data") -> NDArray[np.bool_]:
    """[N] True on rows to hold out: whole groups, about `share` of all rows (if > 0, some but not all).

    Groups are the prompts (or, without a prompt, the chosen texts), so nothing is measured on a prompt that was trained
    on. They are taken in the order of their digests: the choice needs no seed and does not depend on the order of rows.

    Args:
        digests: [N] `group_digest` of each row.
        source: of the rows, for the message.

    Raises:
        DataError: share > 0, but all rows are of one group.
    """
    if share == 0:
        return np.zeros(len(digests), dtype=bool)
    unique, members, counts = np.unique(digests, return_inverse=True, return_counts=True)
    if len(unique) == 1:
        raise DataError(f"{source}: held_out={share} of {len(digests)} rows: all share one prompt, so none can be held "
                        "out; give more prompts, or set held_out to 0")
    left = min(max(1, round(share * len(digests))), len(digests) - 1)
    held = np.zeros(len(unique), dtype=bool)
    for group, count in enumerate(counts.tolist()):
        if count <= left:
            held[group], left = True, left - count
        if not left:
            break
    if not held.any():
        held[int(np.argmin(counts))] = True
    chosen: NDArray[np.bool_] = held[members]
    return chosen
