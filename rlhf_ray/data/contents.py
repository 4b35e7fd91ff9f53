"""What a run's data sets contained when it began: a digest of the rows of each, which a resume and every later reading
compare, so that no row is repeated or missed unnoticed because a file changed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from rlhf_ray.errors import CheckpointError

Contents = list[list[str]]
"""[source, digest] of each data set, in order."""


def _as_text(value: Any) -> str:
    """The text of a value that JSON cannot hold, without the address in memory that Python's text of an object may
    contain, as that of an image does: it differs at every reading."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))


ENCODER = json.JSONEncoder(sort_keys=True, default=_as_text, separators=(",", ":"))


class RowDigest:
    """Digest of the rows read so far: of all their columns, in order. The same from a file, a copy of it, or another
    format with the same values."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def update(self, rows: list[dict[str, Any]]) -> None:
        """Add some rows; how they are divided into calls does not matter. Values that JSON cannot hold count as their
        text."""
        if rows:
            self._hash.update(ENCODER.encode(rows)[1:-1].encode() + b",")

    def __str__(self) -> str:
        return self._hash.hexdigest()


def check_contents(began: Sequence[Sequence[str]], present: Sequence[Sequence[str]]) -> None:
    """Check that data sets contain the rows that they had when the run began. A data set may have moved.

    Raises:
        CheckpointError: the rows of one are others; names it.
    """
    for (former, digest), (source, present_digest) in zip(began, present, strict=False):
        if digest != present_digest:
            where = source if source == former else f"{source} (then {former})"
            raise CheckpointError(
                f"the rows of {where} are not those that the run began with (digest {digest[:12]} then, "
                f"{present_digest[:12]} now): some would be repeated or missed; restore the data, and which of its "
                "rows are used (limit, split, subset, revision), or start a new run in another run.dir")
    if len(began) != len(present):
        raise CheckpointError(f"the run began with {len(began)} data sets ({', '.join(name for name, _ in began)}), "
                              f"and now there are {len(present)}; set them back, or start a new run in another run.dir")
