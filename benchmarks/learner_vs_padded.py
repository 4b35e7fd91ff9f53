"""What packing gives: the same learner on rows laid end to end, and on rows padded to the longest of them."""

from dataclasses import fields, replace
from typing import Any

import numpy as np

from benchmarks.comparison import Benchmark
from benchmarks.learner_side import LearnerSide
from rlhf_ray.records import Experience, offsets_of


class PaddedLearnerSide(LearnerSide):
    """Every row is given its padding as tokens of its own, which carry no loss."""

    def rows(self, whole: Experience) -> Experience:
        """The same rows, all as long as the longest; padding follows the response, where no real token sees it."""
        longest, count = int(whole.lengths.max()), len(whole)
        places = np.concatenate([row * longest + np.arange(length) for row, length in enumerate(whole.lengths)])
        columns: dict[str, Any] = {}
        for column in (f.name for f in fields(Experience) if f.metadata.get("axis") == "token"):
            values = getattr(whole, column)
            columns[column] = np.zeros(count * longest, dtype=values.dtype)
            columns[column][places] = values
        return replace(whole, offsets=offsets_of(np.full(count, longest)), **columns)


BENCHMARK = Benchmark(
    ours=LearnerSide, theirs=PaddedLearnerSide, ours_is="PolicyLearner, packed rows",
    theirs_is="PolicyLearner, rows padded to the longest", unit="tokens/s", goal=1.0, tolerance=1e-3,
)
