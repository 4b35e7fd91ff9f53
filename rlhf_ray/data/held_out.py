"""Choice of the held-out rows: whole groups, by their digests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.config.data import PreferencesConfig, ProcessRowsConfig, PromptsConfig
from rlhf_ray.data.load_report import LoadReport
from rlhf_ray.errors import DataError


def group_digest(group: str) -> int:
    """64-bit digest of the text that rows of a group share, such as their prompt."""
    return int.from_bytes(hashlib.blake2b(group.encode(), digest_size=16).digest()[:8])


class Selectable(Protocol):
    """Rows of which some can be taken."""

    def select(self, rows: Any) -> Self:
        """The given rows, in the given order."""
        ...


T = TypeVar("T", bound=Selectable)
HeldOutSection = PromptsConfig | PreferencesConfig | ProcessRowsConfig


def split_held_out(
    loaded: Sequence[tuple[T, NDArray[np.uint64], LoadReport]], config: HeldOutSection
) -> tuple[list[T], list[T], list[LoadReport]]:
    """(training rows, held-out rows, report) of each data set of a section.

    Args:
        loaded: rows, `group_digest` of each, and report of each data set.

    Raises:
        DataError: as `held_out_parts`.
    """
    held = held_out_parts([digests for _, digests, _ in loaded], config)
    training, held_out = [], []
    for (rows, _, report), out in zip(loaded, held, strict=True):
        training.append(rows.select(np.flatnonzero(~out)))
        held_out.append(rows.select(np.flatnonzero(out)))
        report.held_out = int(out.sum())
    return training, held_out, [report for *_, report in loaded]


def held_out_parts(digests: Sequence[NDArray[np.uint64]], config: HeldOutSection) -> list[NDArray[np.bool_]]:
    """`held_out_digests` of all data sets of a section, [N] of each: a prompt of several is held out of all.

    Args:
        digests: [N] `group_digest` of each row of each data set.

    Raises:
        DataError: all rows are of one group, or none of a data set is left to train on.
    """
    held = held_out_digests(np.concatenate(digests), config.held_out, config.title)
    parts = np.split(held, np.cumsum([len(part) for part in digests])[:-1])
    for part, section in zip(parts, config.parts(), strict=True):
        if len(part) and part.all():
            raise DataError(f"{config.SECTION}.held_out={config.held_out} keeps all {len(part)} rows of "
                            f"{section.location} out of training; lower it, or give more prompts")
    return parts


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
